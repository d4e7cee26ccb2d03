"""A page of `dash-attn explore` that is served, and the browser that shows it."""

from __future__ import annotations

import json
import time
from threading import Thread
from typing import Any

from chromium import Chromium
from dash_attn.cli import explore
from dash_attn.scheduling import Problem, generate
from dash_attn.simulation import Machine, Timeline, simulate
from dash_attn.viewing.explore.server import PageServer, served_page

IDLE = "!document.getElementById('form').hasAttribute('aria-busy')"


class Page:
    """A served page, the browser that shows it, and what it was asked."""

    def __init__(self, browser: Chromium) -> None:
        self.browser, self.asked = browser, 0
        self.server = PageServer(lambda: served_page(explore.start_of_form(explore.START)), self.answer)
        Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, options: Any, watch: Any) -> dict[str, Any]:
        self.asked += 1
        return explore.answer(options, watch=watch)

    def show(self, options: dict[str, Any]) -> None:
        """As the form would: set its fields, press the button, wait for the charts."""
        self.browser.run(f"explore.form.set({json.dumps(options)})\nawait explore.form.ask()")

    @property
    def error(self) -> str:
        return str(self.browser.run("explore.form.said"))

    @property
    def details(self) -> str:
        return str(self.browser.run('document.getElementById("details").innerText'))


def small_timeline(name: str = "ascending") -> Timeline:
    return simulate(generate(name, Problem.from_tiles("causal", 8, 8, heads=4), 8), Machine(compute=3, reduce=1))


def place_of(page: Page, chart: int, time: float, lane: int) -> tuple[float, float]:
    """Where a moment of a worker is on the screen."""
    x, y = page.browser.run(
        f"const chart = explore.state.charts[{chart}]\nconst box = chart.lower.getBoundingClientRect()\n"
        f"[box.left + chart.x({time}), box.top + chart.laneTop({lane}) + 0.3 * chart.laneHeight]"
    )
    return x, y


def place_of_tile(browser: Chromium, q_tile: int, kv_tile: int) -> tuple[float, float]:
    """Where the middle of a tile of an 8 x 8 grid is on the screen."""
    x, y = browser.run(
        f"const {{ grid }} = explore.state\nconst box = grid.lower.getBoundingClientRect()\n"
        f"const [x, y, width, height] = grid.boxOf(grid.items.get({q_tile} * 8 + {kv_tile}))\n"
        "[box.left + x + width / 2, box.top + y + height / 2]"
    )
    return x, y


def centre(browser: Chromium, selector: str) -> tuple[float, float]:
    box = f"const box = document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
    x, y = browser.run(f"{box}\n[box.left + box.width / 2, box.top + box.height / 2]")
    return x, y


def click(browser: Chromium, selector: str) -> None:
    """As a hand does: what happens when the button goes down may move what is under it."""
    browser.run(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{ block: 'center' }})\n1")
    place = centre(browser, selector)
    for kind in ("mousePressed", "mouseReleased"):
        browser.mouse(kind, *place, button="left", clickCount=1)


def wait_until(browser: Chromium, condition: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not browser.run(condition):
        assert time.monotonic() < deadline, condition
        time.sleep(0.05)
