"""The page on a phone, in headless Chromium: fingers tap and scroll, what is about a task is near it, and errors are in sight."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chromium import Chromium
from dash_attn.cli import explore
from explored_page import Page, place_of, place_of_tile

PHONE = (390, 844)
CHOSEN = "explore.state.chosen?.chart.run.title(explore.state.chosen.item) ?? ''"
IN_SIGHT = """
const box = document.querySelector("SELECTOR").getBoundingClientRect()
return [box.height > 0, box.top >= 0 && box.bottom <= innerHeight]
"""
SETTLED = "await new Promise((done) => setTimeout(done, 100))\n1"


@pytest.fixture
def phone(page: Page) -> Iterator[Page]:
    width, height = PHONE
    page.browser.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=True)
    page.browser.send("Emulation.setTouchEmulationEnabled", enabled=True)
    page.browser.open(page.server.url)
    yield page
    page.browser.send("Emulation.setTouchEmulationEnabled", enabled=False)
    page.browser.send("Emulation.clearDeviceMetricsOverride")


def swipe(browser: Chromium, x: float, y: float, right: float = 0, down: float = 0) -> None:
    """By nothing: a tap."""
    browser.send("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
    for part in range(1, 9) if right or down else ():
        place = {"x": x + right * part / 8, "y": y + down * part / 8}
        browser.send("Input.dispatchTouchEvent", type="touchMove", touchPoints=[place])
    browser.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    browser.run(SETTLED)


def in_sight(browser: Chromium, selector: str) -> tuple[bool, bool]:
    there, within = browser.run(IN_SIGHT.replace("SELECTOR", selector))
    return there, within


def test_a_finger_chooses_in_the_tiles_and_in_the_chart(phone: Page) -> None:
    browser = phone.browser
    browser.run("explore.state.grid.lower.scrollIntoView({ block: 'center' })\n1")
    swipe(browser, *place_of_tile(browser, 6, 2))
    assert browser.run(CHOSEN) == "h0.q6.kv2"
    browser.run("explore.state.charts[0].lower.scrollIntoView({ block: 'center' })\n1")
    swipe(browser, *place_of(phone, 0, 21.5, 0))
    assert browser.run(CHOSEN) == "h0.q5.kv0"
    assert browser.run("explore.state.grid.marked === explore.state.chosen.item")


def test_a_finger_scrolls_the_page_and_moves_the_chart(phone: Page) -> None:
    browser = phone.browser
    browser.run("scrollTo(0, 0)\nexplore.state.zoom(0.5)\n1")
    before = browser.run("explore.state.view.from")
    swipe(browser, *place_of(phone, 0, 60, 3), right=-100)
    assert browser.run("[explore.state.view.from > BEFORE, scrollY]".replace("BEFORE", str(before))) == [True, 0]
    swipe(browser, *place_of(phone, 0, 60, 3), down=-100)
    assert browser.run("scrollY") > 50


def test_the_critical_path_leaves_narrow_bars_to_see(phone: Page) -> None:
    share = """
const { over, plot, ratio, laneHeight } = explore.state.charts[0]
const { data } = over.getImageData(plot.left * ratio, plot.top * ratio, 200 * ratio, laneHeight * ratio)
data.filter((_, place) => place % 4 === 3).filter(Boolean).length * 4 / data.length
"""
    assert phone.browser.run(share) == 0
    phone.browser.run("explore.state.togglePath(true)\n1")
    assert 0.1 < phone.browser.run(share) < 0.4


def test_what_is_about_a_task_is_near_the_charts(phone: Page) -> None:
    tops = [
        phone.browser.run(f"document.getElementById('{name}').getBoundingClientRect().top")
        for name in ("charts", "tiles", "details", "figures", "path", "form")
    ]
    assert tops == sorted(tops)


def test_the_figures_of_four_runs_fit(phone: Page) -> None:
    pytest.importorskip("torch")
    phone.show({"seqlen": "256", "heads": "2", "schedule": "ascending,auto", "measured": True, "device": "cpu", "threads": "2"})
    assert len(phone.browser.run("explore.state.charts.map((chart) => chart.run.name)")) == 4
    width = "const { scrollWidth, clientWidth } = document.getElementById('figures')\nscrollWidth - clientWidth"
    assert phone.browser.run(width) == 0


def test_errors_are_in_sight(phone: Page) -> None:
    browser = phone.browser
    for width, height in (PHONE, (1440, 900)):
        browser.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
        phone.show({"colour": "red"})  # of no field
        browser.run("explore.form.form.querySelector('.main').scrollIntoView({ block: 'nearest' })\n1")
        assert in_sight(browser, "#error") == (True, True)
        phone.show({"ranks": "2", "seqlen": "1024", "bandwidth": "0"})
        assert in_sight(browser, "#complaint") == (True, True)
        assert in_sight(browser, "#error") == (False, True)


TARGETS = """
const shown = [...document.querySelectorAll("button, summary")].filter((each) => each.getClientRects().length)
shown.map((each) => each.getBoundingClientRect()).filter(({ width, height }) => Math.min(width, height) < 40).length
"""


def test_fingers_find_what_they_press(phone: Page) -> None:
    phone.browser.run("for (const each of document.querySelectorAll('details')) each.open = true\nexplore.state.charts[0].go(3)\n1")
    assert phone.browser.run(TARGETS) == 0
    phone.browser.send("Emulation.setTouchEmulationEnabled", enabled=False)
    assert phone.browser.run(TARGETS) > 5  # a mouse needs less


OVERLAP = """
const [box, buttons] = ["#progress", ".buttons"].map((name) => document.querySelector(name).getBoundingClientRect())
return [box.height > 0 && buttons.height > 0, box.bottom <= buttons.top, box.left >= 0 && box.right <= innerWidth, box.height < 70]
"""


def test_progress_leaves_the_buttons_to_press(phone: Page) -> None:
    phone.browser.run("explore.form.form.scrollIntoView()\nexplore.form.showProgress(12000, { doing: 'measuring symmetric_shift' })\n1")
    assert phone.browser.run(OVERLAP) == [True] * 4


def test_a_first_question_that_is_refused_leaves_no_empty_frames(phone: Page) -> None:
    browser = phone.browser
    seen = "['tools', 'words', 'keys', 'details', 'charts'].filter((name) => document.getElementById(name).getClientRects().length)"
    browser.reopen(phone.server.url + "#mask=diagonal")
    assert browser.run(seen) == []
    assert browser.run("document.getElementById('title').innerText") == "Nothing is shown yet."
    phone.show(explore.START)
    assert len(browser.run(seen)) == 5
