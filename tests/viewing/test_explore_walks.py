"""The page as a new user meets it, in headless Chromium on a desk and on a phone: clicks, errors, links, long work, tiles."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from chromium import Chromium
from dash_attn.cli import explore
from dash_attn.scheduling import Problem, generate
from dash_attn.viewing.explore import runs
from dash_attn.viewing.explore.server import PageServer, served_page
from dash_attn.viewing.task_times import task_table
from explored_page import IDLE, Page, click, place_of, place_of_tile, wait_until

DESK, PHONE = (1440, 900), (390, 844)
OVERFLOW = """
const { scrollWidth, clientWidth } = document.documentElement
const parts = [...document.querySelectorAll("main, main > *, aside > *, form > *")]
[scrollWidth - clientWidth, parts.filter((part) => part.getBoundingClientRect().right > clientWidth + 1).length]
"""


@pytest.fixture(params=[DESK, PHONE], ids=["desk", "phone"])
def sized(page: Page, request: pytest.FixtureRequest) -> Iterator[Page]:
    width, height = request.param
    page.browser.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
    page.browser.open(page.server.url)
    yield page
    page.browser.send("Emulation.clearDeviceMetricsOverride")


def test_nothing_overflows(sized: Page) -> None:
    browser = sized.browser
    long_mask = {"mask": "documents:" + ",".join(["64"] * 16), "seqlen": "1024", "machine": "h200", "schedule": "ascending,auto"}
    for options in (explore.START, long_mask, {"ranks": "2", "seqlen": "2048", "heads": "2"}):
        sized.show(dict(options))
        browser.run("for (const each of document.querySelectorAll('details')) each.open = true\nexplore.state.charts[0].go(3)\n1")
        browser.run("explore.state.setMoment(1)\nawait new Promise((done) => requestAnimationFrame(done))\n1")
        assert browser.run(OVERFLOW) == [0, 0], options
    sized.show({"mask": "diagonal"})
    assert browser.run(OVERFLOW) == [0, 0]
    browser.run("document.getElementById('title').style.width = '3000px'\n1")  # the control
    assert browser.run(OVERFLOW) != [0, 0]


def test_the_chart_comes_first_on_a_phone(sized: Page) -> None:
    top = {
        name: sized.browser.run(f"document.getElementById('{name}').getBoundingClientRect().top")
        for name in ("charts", "figures", "tiles", "form")
    }
    if sized.browser.run("innerWidth") == PHONE[0]:
        assert top["charts"] < PHONE[1] / 2
        assert top["charts"] < top["tiles"] < top["figures"] < top["form"]
        click(sized.browser, "#to-form")
        wait_until(sized.browser, "Math.abs(document.getElementById('form').getBoundingClientRect().top) < innerHeight / 2")
    else:
        assert top["figures"] < top["charts"] < DESK[1] / 2
        assert abs(top["tiles"] - top["form"]) < 40


def test_the_first_click_on_show_counts(sized: Page) -> None:
    """A number of ranks brings a field more; it must not come when the pointer leaves the field for the button.

    On a screen that has room for all, because nothing else than the field moves the button there.
    """
    width = sized.browser.run("innerWidth")
    sized.browser.send("Emulation.setDeviceMetricsOverride", width=width, height=3600, deviceScaleFactor=1, mobile=False)
    sized.browser.run("document.getElementById('cluster').open = true\n1")
    click(sized.browser, "[name=ranks]")
    sized.browser.send("Input.insertText", text="2")
    asked = sized.asked
    click(sized.browser, "button.main")
    wait_until(sized.browser, "explore.state.charts[0].run.itemWord === 'unit'")
    assert sized.asked == asked + 1
    assert sized.error == ""


def test_it_measures_from_the_start_page(page: Page) -> None:
    pytest.importorskip("torch")
    click(page.browser, "[name=measured]")
    assert page.browser.run("[explore.form.fields.seqlen.value, 'compute' in explore.form.options()]") == ["1024", False]
    page.browser.run("explore.form.fields.seqlen.value = '256'\n1")
    click(page.browser, "button.main")
    wait_until(page.browser, IDLE)
    assert page.error == ""
    assert page.browser.run("explore.state.charts.map((chart) => chart.run.source)") == ["simulated", "measured"] * 2


def test_a_view_can_be_sent(page: Page) -> None:
    browser = page.browser
    page.show({"mask": "window:3,0", "q-tiles": "12", "kv-tiles": "12", "heads": "2", "workers": "4", "schedule": "weave"})
    browser.run(
        "explore.state.charts[0].go(17)\nexplore.state.togglePath(true)\nexplore.state.setMoment(7)\nexplore.state.view.show(3, 9)\n"
        "explore.state.charts[0].lanes.show(0, 3)\nexplore.state.grid.measure('steps')\n1"
    )
    wait_until(browser, "location.hash.includes('from=3&to=9')")
    seen = (
        "const { chosen, showPath, moment, view, charts, grid } = explore.state\n"
        "[chosen?.item, showPath, moment, view.from, view.to, charts[0].lanes.to, grid.order]"
    )
    address, options = browser.run("[location.href, explore.form.options()]")
    browser.reopen(page.server.url)
    assert browser.run(seen) == [None, False, None, 0, pytest.approx(1.015 * 135), 8, "turns"]  # the control
    browser.reopen(f"{page.server.url}#from=here&to=there&lanes=a:b,c&order=toString&moment=now&chart=toString&task=h0.q0.kv0")
    assert page.error == ""
    assert browser.run(seen) == [None, False, 0, 0, pytest.approx(1.015 * 135), 8, "turns"]
    browser.reopen(f"{page.server.url}#from=5&to=1")  # no stretch of time
    assert browser.run(seen)[3:5] == [0, pytest.approx(1.015 * 135)]
    browser.reopen(address)
    assert browser.run(seen) == [17, True, 7, 3, 9, 3, "steps"]
    assert browser.run("explore.form.options()") == options
    page.show({"machine": "elsewhere.json", "q-tiles": "2"})  # of another's page: refused, not left out
    assert "got 'elsewhere.json'" in page.error
    page.show(explore.START)
    browser.run("history.back()\n1")
    wait_until(browser, f"{IDLE} && explore.state.charts.length === 1")
    wait_until(browser, "explore.state.chosen?.item === 17")


def test_the_tiles_are_those_of_the_mask(page: Page) -> None:
    """And their numbers the turns and steps of the schedule."""
    page.show({"mask": "documents:3,5", "q-tiles": "8", "kv-tiles": "8", "heads": "2", "workers": "4", "schedule": "weave"})
    problem = Problem.from_tiles("documents:3,5", 8, 8, heads=2)
    table = task_table(generate("weave", problem, 4))
    for head in range(2):
        kept, partial, turns = page.browser.run(
            f"const {{ grid, charts }} = explore.state\nconst {{ run }} = charts[0]\ngrid.show(charts[0], run.tasksOf({head})[0])\n"
            "[[...grid.items.keys()], [...run.partialTiles], [...grid.items].map(([tile, item]) => [tile, run.turn[item]])]"
        )
        mine = table.head == head
        assert sorted(kept) == np.flatnonzero(problem.kept).tolist()
        assert sorted(partial) == np.flatnonzero(problem.partial).tolist()
        assert sorted(map(tuple, turns)) == sorted(
            zip((table.q_tile * 8 + table.kv_tile)[mine].tolist(), table.turn[mine].tolist(), strict=True)
        )
    assert f"{int(problem.partial.sum())} partial" in page.browser.run("explore.state.grid.title.textContent")


DRAWN = "explore.state.charts[0].over.getImageData(0, 0, 2000, 1000).data.filter(Boolean).length"
COLOURS = """
const { grid } = explore.state
grid.show(grid.chart, null)
const at = (row, column) => {
  const [x, y] = [grid.plot.left + (column + 0.12) * grid.plot.width / 8, grid.plot.top + (row + 0.12) * grid.plot.height / 8]
  return [...grid.context.getImageData(Math.round(x * grid.ratio), Math.round(y * grid.ratio), 1, 1).data].slice(0, 3)
}
return [at(5, 2), at(5, 5), at(2, 5)]
"""


def test_chart_and_tiles_are_linked(sized: Page) -> None:
    browser = sized.browser
    browser.run("explore.state.charts[0].lower.scrollIntoView({ block: 'center' })\n1")
    browser.mouse("mouseMoved", *place_of(sized, 0, 21.5, 0))  # over the chart: its tile is marked
    assert browser.run("[explore.state.charts[0].hovered, explore.state.grid.marked]") == [5, 5]
    browser.run("explore.state.grid.lower.scrollIntoView({ block: 'center' })\n1")
    x, y = place_of_tile(browser, 6, 2)
    browser.mouse("mouseMoved", x, y)  # and back
    assert browser.run("explore.state.charts[0].run.title(explore.state.charts[0].hovered)") == "h0.q6.kv2"
    for kind in ("mousePressed", "mouseReleased"):
        browser.mouse(kind, x, y, button="left", clickCount=1)
    assert browser.run("explore.state.chosen.item === explore.state.grid.items.get(50)")
    drawn = browser.run(DRAWN)
    browser.mouse("mouseMoved", x, y + 24)  # another one, beside that which is chosen
    assert browser.run(DRAWN) > drawn
    assert sized.details.splitlines()[0] == "h0.q6.kv2"
    browser.run("explore.state.grid.lower.focus()\n1")
    for key, title in {
        "ArrowRight": "h0.q6.kv3",
        "ArrowUp": "h0.q5.kv3",
        "h": "h1.q5.kv3",
        "ArrowLeft": "h1.q5.kv2",
        "H": "h0.q5.kv2",
    }.items():
        browser.press(key)
        assert sized.details.splitlines()[0] == title
    full, partial, empty = (np.array(colour) for colour in browser.run(COLOURS))
    assert full[2] > full[0] + 40  # blue
    assert partial[0] > partial[2] + 40  # orange
    assert np.ptp(empty) < 20  # neither
    browser.press("Escape")
    assert browser.run("explore.state.chosen") is None


def test_there_are_no_tiles_of_ranks(page: Page) -> None:
    page.show({"ranks": "2", "seqlen": "2048", "heads": "2"})
    assert page.browser.run("explore.state.grid.figure.hidden") is True
    page.show(explore.START)
    assert page.browser.run("explore.state.grid.figure.hidden") is False


class Slow:
    """A server whose work lasts until it may end, and that notes how it ended."""

    def __init__(self) -> None:
        self.may_end, self.ended, self.how = Event(), Event(), ""
        self.server = PageServer(lambda: served_page(explore.start_of_form(explore.START)), self.answer)
        Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, options: Any, watch: Any) -> dict[str, Any]:
        if options.get("heads") == "5":
            tell = watch("simulating weave")
            try:
                for done in range(600):
                    if self.may_end.wait(0.05):
                        break
                    tell(done, 100)
            except OSError as error:
                self.how = type(error).__name__
                raise
            finally:
                self.ended.set()
        return explore.answer(options)


@pytest.fixture
def slow() -> Iterator[Slow]:
    made = Slow()
    yield made
    made.may_end.set()
    made.server.shutdown()
    made.server.server_close()


def test_long_work_says_how_far_it_is_holds_nobody_and_can_be_cancelled(browser: Chromium, slow: Slow) -> None:
    browser.problems.clear()
    browser.open(slow.server.url)
    assert browser.run("document.getElementById('progress').hidden") is True
    browser.run("explore.form.fields.heads.value = '5'\nexplore.form.ask()\n1")
    wait_until(browser, "!document.getElementById('progress').hidden")
    assert browser.run("document.getElementById('doing').textContent").startswith("simulating weave, 1 s")
    assert 0 < browser.run("document.querySelector('progress').value") < 1
    for method, path, body in (("GET", "/", None), ("POST", "/runs", json.dumps({"q-tiles": "2"}))):  # of another tab
        connection = http.client.HTTPConnection("127.0.0.1", slow.server.port, timeout=5)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        assert (reply.status, len(reply.read()) > 1000) == (200, True)
        connection.close()
    assert not slow.ended.is_set()
    click(browser, "#cancel")
    assert slow.ended.wait(5)
    assert slow.how in ("BrokenPipeError", "ConnectionResetError")
    wait_until(browser, IDLE)
    assert browser.run("[document.getElementById('progress').hidden, explore.form.said, explore.state.charts.length]") == [True, "", 2]
    assert browser.problems == []


def test_long_work_ends_with_its_answer(browser: Chromium, slow: Slow) -> None:
    browser.open(slow.server.url)
    browser.run("explore.form.fields.heads.value = '5'\nexplore.form.ask()\n1")
    wait_until(browser, "!document.getElementById('progress').hidden")
    slow.may_end.set()
    wait_until(browser, "document.getElementById('progress').hidden")
    assert browser.run("explore.state.charts[0].run.heads") == 5


def test_all_long_work_is_told(page: Page) -> None:
    """And who ends a measurement leaves it to others."""
    pytest.importorskip("torch")
    told: list[tuple[str, int, int]] = []

    def watch(label: str) -> Callable[[int, int], None]:
        return lambda done, total: told.append((label, done, total))

    options = {"seqlen": "128", "schedule": "ascending,auto", "measured": True, "device": "cpu", "threads": "1"}
    runs = explore.answer(options, watch=watch)["runs"]
    measuring = [(f"measuring {name}", done, 9) for name in ("ascending", "auto") for done in range(9)]
    assert told == [*measuring, ("preparing the charts", 0, 2), ("preparing the charts", 1, 2)]
    assert all(dict(run["figures"])["makespan"].endswith(" us") for run in runs)
    told.clear()
    explore.answer(explore.START, watch=watch)
    assert list(dict.fromkeys(label for label, _, _ in told)) == ["simulating ascending", "simulating alternating", "preparing the charts"]

    def leave(done: int, total: int) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        explore.answer(options, watch=lambda label: leave)
    assert not explore.MEASURING.locked()


def test_dealing_units_to_ranks_is_told_and_can_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int, int]] = []

    def watch(label: str) -> Callable[[int, int], None]:
        return lambda done, total: told.append((label, done, total))

    options = {"ranks": "2", "seqlen": "1024"}
    (units,) = {len(run["units"]["does"]) for run in explore.answer(options, watch=watch)["runs"]}
    dealing = [(done, total) for label, done, total in told if label == "dealing units to ranks"]
    assert len(dealing) > units / 2
    assert dealing[0] == (0, 1)
    assert dealing[-1] == (units, units)
    assert {label for label, _, _ in told} == {"dealing units to ranks", "simulating launch", "simulating overlap"}

    monkeypatch.setattr(runs, "MOST_UNITS", units - 1)
    told.clear()
    with pytest.raises(ValueError, match=f"at most {units - 1} units; got {units}"):
        explore.answer(options, watch=watch)
    assert {label for label, _, _ in told} == {"dealing units to ranks"}  # before they are simulated


def test_one_page_at_a_time_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    options = {"seqlen": "128", "measured": True, "device": "cpu", "threads": "1"}
    with explore.MEASURING, pytest.raises(ValueError, match="another measurement is running"):
        explore.answer(options)
    assert len(explore.answer(options)["runs"]) == 2
    assert not explore.MEASURING.locked()
