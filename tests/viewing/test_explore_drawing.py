"""The page in headless Chromium: colours against numpy, speed, and random problems."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from dash_attn import Causal
from dash_attn.cli import explore
from dash_attn.scheduling import GENERATORS, Problem, generate
from dash_attn.simulation import Timeline, simulate
from dash_attn.simulation.machines import SHIPPED
from dash_attn.viewing.task_times import times_of
from explored_page import Page

LARGE = {"seqlen": "16384", "heads": "16", "schedule": "ascending,auto", "machine": "h200"}
MOST_MS = 100.0
FRAME = "await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"

AVERAGED = """
const { state } = explore
const chart = state.charts[0]
state.redraw()
const { plot, run, palette } = chart
const left = Math.round(plot.left), top = Math.round(plot.top)
const rows = [0, 40, 131].map((lane) => Math.round(plot.top + (lane + 0.4) * chart.laneHeight))
return { crisp: chart.crisp, width: Math.round(plot.width), to: state.view.to, palette: palette.rgb, idle: palette.idle,
  rows: rows.map((y) => [...chart.context.getImageData(left, y, Math.round(plot.width), 1).data]) }
"""


REDRAWN = """
const { state } = explore
const times = {}
const measure = (name, prepare) => {
  const all = []
  for (let i = 0; i < 7; i++) {
    prepare(i)
    const start = performance.now()
    state.redraw()
    for (const chart of state.charts) for (const context of [chart.context, chart.over]) context.getImageData(0, 0, 1, 1)
    all.push(performance.now() - start)
  }
  times[name] = Math.min(...all) // what else runs on this machine only adds time
}
for (const path of [false, true]) {
  state.togglePath(path)
  for (const share of [1, 0.5, 0.1, 0.01, 0.001]) {
    measure(`${share} ${path}`, (i) => {
      const span = share * state.view.whole
      state.view.from = (state.view.whole - span) * (i / 7)
      state.view.to = state.view.from + span
    })
  }
}
state.charts[0].zoomLanes(0.1)
measure("few workers", () => state.showAll())
return { times, tasks: state.charts.map((chart) => chart.run.items), size: [innerWidth, innerHeight] }
"""


POKE = """
const { state } = explore
const keys = ["ArrowRight", "ArrowDown", "w", "n", "c", "c", "C", ".", ".", ",", "+", "v", "V", "ArrowUp", "0", "Escape"]
for (const chart of state.charts) {
  for (const key of keys) chart.pressedKey(key)
  for (let i = 0; i < 30; i++) chart.hover(chart.itemAt(i * 30, (i * 37) % chart.height))
  for (let item = 0; item < chart.run.items; item += 1 + (chart.run.items >> 4)) {
    chart.go(item)
    document.querySelector("#details li button")?.click()
  }
}
document.getElementById("path").open = true
await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))
const pixels = ({ context, lower }) => new Uint32Array(context.getImageData(0, 0, lower.width, lower.height).data.buffer)
const colours = state.charts.map((chart) => new Set(pixels(chart)).size)
document.getElementById("path").open = false
return { colours, names: state.charts.map((chart) => chart.run.name), error: document.getElementById("error").textContent }
"""


def contrast(first: list[float], second: list[float]) -> float:
    def luminance(colour: list[float]) -> float:
        parts = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(page: Page, scheme: str) -> None:
    """Text can be read on its ground, and the canvas follows."""
    page.browser.prefer(scheme)
    code = """
const rgb = (text) => text.match(/\\d+/g).slice(0, 3).map(Number)
const style = getComputedStyle(document.body)
const hint = getComputedStyle(document.querySelector(".hint"))
const canvas = explore.state.charts[0].context
const shown = (text) => { canvas.save(); canvas.fillStyle = text; const found = canvas.fillStyle; canvas.restore(); return found }
const ground = getComputedStyle(document.getElementById("details")).backgroundColor
return [rgb(style.backgroundColor), rgb(style.color), rgb(ground), rgb(hint.color), shown(explore.state.charts[0].theme.idle)]
"""
    paper, ink, panel, hint, idle = page.browser.run(FRAME + code)
    page.browser.prefer("light")
    assert (sum(paper) > 600) == (scheme == "light")
    assert contrast(paper, ink) > 7
    assert contrast(panel, hint) > 4.5
    assert contrast(paper, hint) > 4.5
    assert (int(idle[1:3], 16) > 128) == (scheme == "light")


def test_colours_can_be_chosen(page: Page) -> None:
    seen = []
    for _ in range(3):
        page.browser.run('document.getElementById("theme").click()\n1')
        seen.append(page.browser.run("[document.documentElement.dataset.theme, getComputedStyle(document.body).backgroundColor]"))
        assert page.browser.run("getComputedStyle(document.documentElement).colorScheme") == seen[-1][0]  # of what the browser draws
    assert [theme for theme, _ in seen] == ["light", "dark", "light"]
    assert seen[0][1] != seen[1][1]


def test_a_pixel_is_the_average_of_what_its_worker_did(page: Page) -> None:
    """Against numpy: the colours of a worker's bars, weighed by the time they have in a pixel."""
    page.show({"seqlen": "8192", "heads": "8", "schedule": "ascending", "machine": "h200"})
    seen = page.browser.run(AVERAGED)
    schedule = generate("ascending", Problem(Causal(), 8192, 8192, heads=8), 132)
    timeline = simulate(schedule, SHIPPED["h200"].pick(None)[0])
    assert not seen["crisp"]
    edges = np.linspace(0, seen["to"], seen["width"] + 1)
    unmarked = (edges[1:] < timeline.makespan - 30) & (np.abs(edges[:-1] - timeline.lower_bound) > 30)  # but for makespan and bound
    assert unmarked.sum() > 400
    for lane, row in zip((0, 40, 131), seen["rows"], strict=True):
        wanted = averages_of(timeline, lane, edges, np.array(seen["palette"]), np.array(seen["idle"]))
        image = np.array(row).reshape(-1, 4)[:, :3]
        assert np.abs(image - wanted)[unmarked].max() < 1.5
        assert np.abs(image[::-1] - wanted)[unmarked].max() > 50  # the control


def averages_of(timeline: Timeline, lane: int, edges: Any, palette: Any, idle: Any) -> Any:
    spans, stall, startup = times_of(timeline), len(palette) - 3, len(palette) - 2
    mine, chains = spans.worker_of_task == lane, spans.worker == lane
    started = timeline.execution.chain_start[chains] / timeline.machine.ticks_per_unit
    begin = np.concatenate([spans.compute_start[mine], spans.waits[0][mine], started])
    end = np.concatenate([spans.compute_end[mine], spans.waits[1][mine], spans.compute_start[spans.offsets[:-1][chains]]])
    colour = np.concatenate([spans.q_tile[mine], np.full(mine.sum(), stall), np.full(chains.sum(), startup)])
    inside = np.minimum(end[:, None], edges[1:]) - np.maximum(begin[:, None], edges[:-1])
    shares = np.clip(inside, 0, None) / (edges[1] - edges[0])
    return shares.T @ palette[colour] + (1 - shares.sum(0))[:, None] * idle


def test_a_large_problem_is_redrawn_within_a_tenth_of_a_second(page: Page) -> None:
    """16,384 tokens, 16 heads, two schedules: both charts, the quickest of seven, a pixel read back so that all is drawn."""
    page.show(LARGE)
    found = page.browser.run(REDRAWN)
    assert found["tasks"] == [264192, 264192]
    assert max(found["times"].values()) < MOST_MS, found["times"]


def random_options(rng: random.Random) -> dict[str, Any]:
    q_tiles, kv_tiles, name = rng.randint(1, 24), rng.randint(1, 12), rng.choice(["auto", *GENERATORS])
    half = rng.randint(0, kv_tiles)
    parts = ",".join(str(part) for part in (half, kv_tiles - half) if part)
    masks = ["full", "causal", f"window:{rng.randint(-1, kv_tiles)},{rng.randint(-1, kv_tiles)}", f"prefix:{half}", f"documents:{parts}"]
    options: dict[str, Any] = {"mask": rng.choice(masks), "schedule": f"{name},{rng.choice(list(GENERATORS))}"}
    for field, most in {"heads": 6, "group": 6, "batch": 3, "workers": 40}.items():
        options[field] = str(rng.randint(1, most))
    if rng.random() < 0.3:
        options |= {"machine": "h200"}
    else:
        options |= {"compute": rng.choice(["1", "2.5", "3"]), "reduce": rng.choice(["0", "0.3", "1"])}
        options |= {"overlap": str(rng.randint(0, 3)), "latency": rng.choice(["0", "0.5", "4"]), "startup": rng.choice(["0", "2"])}
    if rng.random() < 0.2:
        ranks = rng.randint(1, 4)
        rows = 2 * ranks * 128 * rng.randint(1, 4)
        ranks_too = {"ranks": str(ranks), "seqlen": str(rows), "mask": rng.choice(["full", "causal"]), "schedule": "auto"}
        return {**options, **ranks_too, "execution": rng.choice(["launch", "overlap"])}
    return {**options, "q-tiles": str(q_tiles), "kv-tiles": str(kv_tiles)}


def answer_or_reason(options: dict[str, Any]) -> tuple[list[str], str]:
    """The names of the runs, and what is said where there are none."""
    try:
        return [run["name"] for run in explore.answer(options)["runs"]], ""
    except ValueError as error:
        return [], str(error)


@pytest.mark.exhaustive
def test_fifty_random_problems_are_drawn_without_a_script_error(page: Page) -> None:
    rng = random.Random(20)
    shown = refused = several = 0
    while shown < 50:
        options = random_options(rng)
        names, reason = answer_or_reason(options)
        page.show(options)
        if reason:
            assert page.error == reason
            refused += 1
            continue
        seen = page.browser.run(POKE)
        assert page.browser.problems == [], options
        assert (seen["error"], seen["names"]) == ("", names), options
        assert min(seen["colours"]) > 3, options  # something was drawn
        shown, several = shown + 1, several + ("ranks" in options)
    assert refused < 25
    assert several > 3
