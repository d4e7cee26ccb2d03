"""The form of the page in headless Chromium: where its errors stand and how they are worded, what it asks, what it says of its fields."""

from __future__ import annotations

import json

from dash_attn.cli import explore
from explored_page import IDLE, Page, click, wait_until

PLACES = {  # what is asked, the field that is named, what is said of it
    "q-tiles": ({"q-tiles": "eight"}, "“Q tiles” must be a whole number >= 1; got eight"),
    "heads": ({"heads": "0"}, "“KV heads” must be a whole number"),
    "kv-tiles": ({"kv-tiles": "1000000000"}, "at most 268,435,456 tiles"),
    "group": ({"group": "1000000000"}, "at most 2,000,000 tasks per schedule; got 36,000,000,000 (fewer or larger tiles, or fewer heads)"),
    "mask": ({"mask": "--heads"}, "unknown mask '--heads'"),
    "compute": ({"compute": "0"}, "“Compute” must be a finite number > 0"),
    "latency": ({"latency": "1e300"}, "larger unit of time"),
    "schedule": ({"mask": "causal", "schedule": "shift_blocks"}, "shift_blocks serves full masks only"),
    "seqlen": ({"seqlen": "65536", "heads": "64"}, "at most 2,000,000 tasks"),
    "bandwidth": ({"ranks": "2", "seqlen": "1024", "bandwidth": "0"}, "“Bandwidth, GB/s” must be a number > 0"),
    "ranks": ({"ranks": "3", "seqlen": "1000"}, "1000 rows cannot be dealt so (but 996 or 1002 can)"),
    "kv-seqlen": ({"ranks": "2", "seqlen": "1024", "kv-seqlen": "512"}, "are the same 1024 rows"),
    "head-dim": ({"machine": "h200", "head-dim": "7"}, "head dims 64, 128; got 7"),
}


def test_errors_stand_beside_their_field(page: Page) -> None:
    beside = (
        "const complaint = document.getElementById('complaint')\nconst [field] = document.querySelectorAll('[aria-invalid]')\n"
        "const gap = complaint.getBoundingClientRect().top - field.getBoundingClientRect().bottom\n"
        "[field.name, document.activeElement.name, field.getAttribute('aria-describedby'), complaint.innerText, gap]"
    )
    for name, (options, said) in PLACES.items():
        page.show(options)
        found, focused, described, words, gap = page.browser.run(beside)
        assert (found, focused, described) == (name, name, "complaint")
        assert said in words
        assert "--" not in words.replace("'--heads'", "")
        assert "Sharding" not in words
        assert 0 <= gap < 40
    page.show(explore.START)
    assert page.browser.run("document.querySelectorAll('#complaint, [aria-invalid]').length") == 0
    with explore.MEASURING:
        page.show({"seqlen": "128", "measured": True})
    assert page.browser.run(beside)[:2] == ["measured", "measured"]
    for ranks, said in (("16", "multiples of 128 rows"), ("1000000000", "at most 128 ranks")):
        page.show({"ranks": ranks, "seqlen": "1024"})
        found, _, _, words, _ = page.browser.run(beside)
        assert found == "ranks"
        assert said in words
        assert "Sharding" not in words


def test_an_address_that_asks_for_something_else_can_be_mended(page: Page) -> None:
    """What no field can have is refused, until a field is changed."""
    error = "document.getElementById('error').innerText"
    page.browser.reopen(f"{page.server.url}#heads=2&colour=red&device=cpu")
    assert "'colour'" in page.browser.run(error)
    assert page.browser.run("document.querySelector('[aria-invalid]')") is None
    click(page.browser, "[name=heads]")
    page.browser.send("Input.insertText", text="1")
    click(page.browser, "button.main")
    wait_until(page.browser, f"{IDLE} && explore.state.charts.length")
    assert page.error == page.browser.run(error) == ""


def test_what_measures_is_asked_only_to_measure(page: Page) -> None:
    page.browser.run('explore.form.set({ seqlen: "128", measured: true, device: "cpu", threads: "2" })\n1')
    assert page.browser.run("explore.form.options()")["threads"] == "2"
    click(page.browser, "[name=measured]")
    click(page.browser, "button.main")
    wait_until(page.browser, f"{IDLE} && explore.state.charts.length === 1")
    assert page.error == ""


def test_the_form_says_what_ranks_take_if_nothing_is_given(page: Page) -> None:
    hint = "explore.form.fields.compute.placeholder"
    for options, said in (({}, "1"), ({"ranks": "2", "seqlen": "1024"}, "of h200"), ({"ranks": "2", "seqlen": "1024", "reduce": "2"}, "1")):
        assert page.browser.run(f"explore.form.set({json.dumps(options)})\n{hint}") == said


def test_names_have_a_sentence_and_machines_have_microseconds(page: Page) -> None:
    titles = "[...document.querySelectorAll('#figures th')].map((each) => each.title)"
    for schedule, machine, unit in (("auto", {}, "model time"), ("auto,weave", {"machine": "h200"}, "microseconds")):
        page.show({"q-tiles": "4", "schedule": schedule, **machine})
        found = page.browser.run(titles)
        assert all(found[1:])
        assert found[0] == ""
        assert page.browser.run("explore.state.charts[0].figure.innerText").endswith(f"in {unit}")


def test_ranks_have_one_schedule(page: Page) -> None:
    page.browser.run('explore.form.set({ schedule: "ascending,auto", ranks: "2", seqlen: "1024" })\n1')
    assert page.browser.run("[explore.form.fields.second.offsetParent, explore.form.options().schedule]") == [None, "ascending"]
    page.browser.run('explore.form.set({ schedule: "ascending,auto", seqlen: "1024" })\n1')
    assert page.browser.run("[!explore.form.fields.second.offsetParent, explore.form.options().schedule]") == [False, "ascending,auto"]
