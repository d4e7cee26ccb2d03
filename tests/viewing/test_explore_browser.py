"""The page in headless Chromium: what it draws and says against the simulator, keyboard, colours, speed, other origins."""

from __future__ import annotations

import json
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Thread

import pytest

from chromium import Chromium
from dash_attn.cli import explore
from dash_attn.viewing.explore.server import saved_page
from dash_attn.viewing.task_times import times_of
from explored_page import Page, place_of, small_timeline

LARGE = {"seqlen": "16384", "heads": "16", "schedule": "ascending,auto", "machine": "h200"}
MOST_MS = 100.0
FRAME = "await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def test_the_first_page_shows_two_schedules_and_asks_nobody_else(page: Page) -> None:
    names = page.browser.run("explore.state.charts.map((chart) => chart.run.name)")
    assert names == ["ascending", "alternating"]
    assert page.browser.requests == [page.server.url, page.server.url + "runs"]
    table = page.browser.run('document.getElementById("figures").innerText')
    assert "87.5 %" in table
    assert "135" in table


def test_a_page_that_complains_is_noticed(browser: Chromium, tmp_path: Path) -> None:
    """The control of every test here: a script error, and a script that the policy forbids."""
    for name, code in {"throws.html": "throw new Error('planted')", "forbidden.html": "1"}.items():
        text = saved_page(explore.answer(explore.START))
        old, new = (
            ("window.explore =", f"{code}; window.explore =") if name == "throws.html" else ("<main", "<script>planted</script><main")
        )
        (tmp_path / name).write_text(text.replace(old, new))
        browser.problems.clear()
        if name == "throws.html":  # also a changed script is refused, because its hash is another one
            with pytest.raises(AssertionError):
                browser.open((tmp_path / name).as_uri())
        else:
            browser.open((tmp_path / name).as_uri())
        assert "Content Security Policy" in " ".join(browser.problems)
    browser.problems.clear()
    browser.run("setTimeout(() => { throw new Error('planted') }); await new Promise((done) => setTimeout(done, 50))\n1")
    assert "planted" in " ".join(browser.problems)
    browser.problems.clear()


def test_one_worker_is_not_called_several(page: Page) -> None:
    page.show({"mask": "full", "q-tiles": "1", "workers": "1", "schedule": "ascending"})
    page.browser.run("document.getElementById('path').open = true\nawait new Promise((done) => setTimeout(done, 50))\n1")
    page.browser.run("explore.state.setMoment(0.5)\n1")
    summary = page.browser.run("explore.state.charts[0].lower.getAttribute('aria-label')")
    assert "1 worker over model time, 1 task; " in summary
    assert "2 events" in page.browser.run("document.getElementById('path').innerText")
    page.show({"q-tiles": "8", "heads": "4", "workers": "8", "compute": "3", "reduce": "1", "schedule": "ascending"})
    page.browser.run("const { run } = explore.state.charts[0]\nrun.bars.phase.fill(3, run.bars.first[0])\nexplore.state.setMoment(3.5)\n1")
    said = page.browser.run("document.getElementById('at-moment').innerText")
    assert "8 stalled" in said
    assert "and 2 more stalled workers" in said
    page.show({"ranks": "1", "seqlen": "1024", "execution": "launch"})
    page.browser.run("const { run } = explore.state.charts[0]\nexplore.state.setMoment(run.makespan / 2)\n1")
    assert "1 unit running" in page.browser.run("document.getElementById('at-moment').innerText")


CONTRAST = """
const light = (words) => {
  const shares = words.match(/[0-9.]+/g).slice(0, 3).map((value) => Number(value) / 255)
  const [r, g, b] = shares.map((share) => (share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4))
  return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05
}
const field = document.querySelector("input[placeholder]")
const [a, b] = [light(getComputedStyle(field, "::placeholder").color), light(getComputedStyle(field).backgroundColor)]
return Math.max(a, b) / Math.min(a, b)
"""


def test_hints_in_fields_can_be_read(page: Page) -> None:
    for scheme in ("light", "dark"):
        page.browser.prefer(scheme)
        page.browser.reopen(page.server.url)
        assert page.browser.run(CONTRAST) >= 4.5
    page.browser.prefer("light")


def test_time_goes_step_by_step(page: Page) -> None:
    timeline = small_timeline()
    page.show({**explore.START, "schedule": "ascending"})
    spans = times_of(timeline)
    ends = (spans.compute_start, spans.compute_end, spans.reduce_start, spans.reduce_end)
    events = sorted({float(time) for times in ends for time in times})
    seen = []
    for _ in range(6):
        page.browser.run("document.querySelector('[data-key=\".\"]').click()\n1")
        seen.append(page.browser.run("explore.state.moment"))
    assert seen == events[:6]
    page.browser.run("document.querySelector('[data-key=\",\"]').click()\n1")
    assert page.browser.run("explore.state.moment") == events[4]
    moment = 40.0
    page.browser.run(f"explore.state.setMoment({moment})\n1")
    computing = int(((spans.compute_start <= moment) & (moment < spans.compute_end)).sum())
    reducing = int(((spans.reduce_start <= moment) & (moment < spans.reduce_end)).sum())
    stalled = int(((spans.waits[0] <= moment) & (moment < spans.waits[1])).sum())
    said = page.browser.run('document.getElementById("at-moment").innerText')
    assert f"{computing} computing, {reducing} reducing, {stalled} stalled" in said
    assert "waits for turn" in said
    page.browser.run("explore.state.play()\nawait new Promise((done) => setTimeout(done, 200))\nexplore.state.play()\n1")
    assert page.browser.run("explore.state.moment") > moment


def test_the_keyboard_goes_everywhere(page: Page) -> None:
    browser = page.browser
    browser.run("explore.state.charts[0].lower.focus()")
    browser.press("ArrowRight")
    first = page.details.splitlines()[0]
    assert first == "h0.q0.kv0"
    browser.press("ArrowRight")
    assert page.details.splitlines()[0] == "h0.q1.kv0"
    browser.press("ArrowDown")
    assert page.details.splitlines()[0] == "h0.q1.kv1"
    browser.press("w")
    assert page.details.splitlines()[0] == "h0.q1.kv0"
    browser.press("n")
    assert page.details.splitlines()[0] == "h0.q2.kv0"
    browser.press("ArrowLeft")
    assert page.details.splitlines()[0] == "h0.q1.kv0"
    spoken = browser.run('document.getElementById("spoken").textContent')
    assert spoken.startswith("h0.q1.kv0: worker 0, turn 0 of 0 to 1")
    whole = browser.run("explore.state.view.to")
    browser.press("+")
    browser.run(FRAME + "\n1")
    assert browser.run("explore.state.view.to - explore.state.view.from") == pytest.approx(0.7 * whole)
    browser.press("0")
    assert browser.run("explore.state.view.to") == whole
    browser.press("v")
    assert browser.run("explore.state.charts[0].lanes.to - explore.state.charts[0].lanes.from") == pytest.approx(0.7 * 8)
    browser.press("V")
    browser.press(".")
    assert browser.run("explore.state.moment") == 0
    browser.press("Escape")
    assert "Point at a task" in page.details


def test_the_mouse_zooms_drags_and_chooses(page: Page) -> None:
    browser = page.browser
    x, y = place_of(page, 0, 40, 3)
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-500)
    browser.run(FRAME + "\n1")
    view = browser.run("explore.state.view")
    assert view["to"] - view["from"] < 0.6 * 137
    assert view["from"] < 40 < view["to"]
    browser.mouse("mousePressed", x, y, button="left", clickCount=1)
    browser.mouse("mouseMoved", x + 50, y, button="left", buttons=1)
    browser.mouse("mouseReleased", x + 50, y, button="left", clickCount=1)
    browser.run(FRAME + "\n1")
    assert browser.run("explore.state.view.from") < view["from"]
    assert browser.run("explore.state.chosen") is None
    browser.mouse("mousePressed", x, y, button="left", clickCount=1)
    browser.mouse("mouseReleased", x, y, button="left", clickCount=1)
    assert browser.run("explore.state.chosen.item") >= 0
    browser.run("document.querySelector('#details li button').click()\n1")


NAMED = {"button", "combobox", "textbox", "checkbox", "radio", "slider", "application", "form", "toolbar", "group", "DisclosureTriangle"}


def test_everything_has_a_name_for_screen_readers(page: Page) -> None:
    page.browser.send("Accessibility.enable")
    nodes = page.browser.send("Accessibility.getFullAXTree")["nodes"]
    page.browser.send("Accessibility.disable")
    named = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]
    roles = [role for role, _ in named]
    assert roles.count("application") == 3
    assert {"button", "combobox", "textbox", "slider", "alert", "main", "complementary"} <= set(roles)
    assert [role for role, name in named if role in NAMED - {"group"} and not name.strip()] == []
    (chart, _, _) = [name for role, name in named if role == "application"]
    assert "8 workers" in chart
    assert "makespan 135" in chart
    assert page.browser.run("document.documentElement.lang") == "en"
    assert page.browser.run('document.getElementById("spoken").getAttribute("aria-live")') == "polite"


def test_a_saved_page_needs_nobody(browser: Chromium, tmp_path: Path) -> None:
    for name, options in {"small": explore.START, "large": LARGE, "ranks": {"ranks": "4", "seqlen": "8192", "heads": "4"}}.items():
        path = tmp_path / f"{name}.html"
        path.write_text(saved_page(explore.answer(options)))
        browser.problems.clear()
        browser.requests.clear()
        browser.open(path.as_uri())
        assert browser.run("explore.state.charts.length") == 2
        assert browser.run('document.getElementById("form").hidden') is True
        assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []
        assert browser.problems == []


def test_a_measured_run_stands_below_its_simulation(page: Page) -> None:
    pytest.importorskip("torch")
    page.show({"seqlen": "512", "heads": "2", "schedule": "ascending", "measured": True, "device": "cpu", "threads": "2"})
    assert page.error == ""
    names = page.browser.run("explore.state.charts.map((chart) => chart.run.name)")
    assert names == ["ascending, simulated", "ascending, measured"]
    path = page.browser.run(
        "const { run } = explore.state.charts[1]\nrun.path.map((e) => run.span(e.item, e.phase))",
    )
    assert all(earlier[1] <= later[0] + 1e-9 for earlier, later in pairwise(path))
    assert page.browser.run("explore.state.charts[1].run.makespan") == pytest.approx(path[-1][1])


def test_the_form_says_what_was_refused_and_keeps_the_charts(page: Page) -> None:
    page.show({"mask": "diagonal"})
    assert "unknown mask 'diagonal'" in page.error
    assert page.browser.run("explore.state.charts.length") == 2
    page.show({**explore.START, "schedule": "shift,auto"})
    assert page.error == ""
    assert "shift cannot serve this problem" in page.browser.run('document.getElementById("refused").textContent')


def test_a_server_that_has_gone_is_said(page: Page) -> None:
    conditions = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.browser.send("Network.emulateNetworkConditions", offline=True, **conditions)
    page.browser.run("await explore.form.ask()\n1")
    page.browser.send("Network.emulateNetworkConditions", offline=False, **conditions)
    assert "still running?" in page.error
    page.browser.problems.clear()  # the browser says that it could not connect


def test_the_form_sends_what_it_shows(page: Page) -> None:
    for options in ({**explore.START}, {**LARGE, "mask": "causal"}, {"mask": "full", "ranks": "2", "seqlen": "1024", "schedule": "auto"}):
        assert page.browser.run(f"explore.form.set({json.dumps(options)})\nexplore.form.options()") == options


def test_the_page_saves_itself(page: Page, tmp_path: Path) -> None:
    browser = page.browser
    browser.send("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    browser.run("await explore.form.save()\n1")
    saved = tmp_path / "dash-attn-explore.html"
    deadline = time.monotonic() + 20
    while not saved.exists() and time.monotonic() < deadline:
        browser.run("await new Promise((done) => setTimeout(done, 50))\n1")
    browser.open(saved.as_uri())
    assert browser.run("explore.state.charts.map((chart) => chart.run.name)") == ["ascending", "alternating"]


ELSEWHERE = """
const results = []
for (const [path, init] of Object.entries({
  runs: { method: "POST", headers: { "Content-Type": "application/json" }, body: "{}" },
  page: { method: "POST", mode: "no-cors", body: "{}" },
  "": { mode: "no-cors" },
})) {
  try { const reply = await fetch("URL" + path, init); results.push([reply.type, reply.status]) } catch (error) { results.push("refused") }
}
const frame = document.createElement("iframe")
frame.src = "URL"
document.body.append(frame)
await new Promise((done) => setTimeout(done, 300))
let inside = "hidden"
try { inside = frame.contentDocument.body.innerText } catch (error) { inside = "hidden" }
return [results, inside]
"""


def test_a_page_of_another_origin_gets_nothing(page: Page, tmp_path: Path) -> None:
    """Another port of this machine is another origin."""
    (tmp_path / "evil.html").write_text("<!DOCTYPE html><body>evil<script>window.explore = {ready: 1}</script>")
    other = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(tmp_path)))
    Thread(target=other.serve_forever, daemon=True).start()
    before = page.asked
    try:
        page.browser.open(f"http://127.0.0.1:{other.server_port}/evil.html")
        results, inside = page.browser.run(ELSEWHERE.replace("URL", page.server.url))
    finally:
        other.shutdown()
        other.server_close()
    page.browser.problems.clear()  # the browser complains on our behalf
    assert results[0] == "refused"
    assert all(result in ("refused", ["opaque", 0]) for result in results[1:])  # opaque: nothing of it can be read
    assert inside == "hidden"
    assert page.asked == before
