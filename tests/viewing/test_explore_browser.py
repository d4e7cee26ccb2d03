"""The page in headless Chromium: what it draws and says against the simulator, keyboard, colours, speed, other origins."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from chromium import Chromium, needs_chromium
from dash_attn import Causal
from dash_attn.cli import explore
from dash_attn.scheduling import GENERATORS, Problem, generate
from dash_attn.scheduling.ranks.sharding import Sharding
from dash_attn.scheduling.ranks.share import share
from dash_attn.simulation import Machine, Timeline, simulate
from dash_attn.simulation.cluster import Cluster, simulate_ranks
from dash_attn.simulation.critical_path import turn_predecessors
from dash_attn.simulation.machines import SHIPPED
from dash_attn.viewing.explore.runs import recorded, shared_run
from dash_attn.viewing.explore.server import PageServer, saved_page, served_page
from dash_attn.viewing.task_times import Noted, times_from, times_of

LARGE = {"seqlen": "16384", "heads": "16", "schedule": "ascending,auto", "machine": "h200"}
MOST_MS = 100.0
FRAME = "await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


class Page:
    """A served page, the browser that shows it, and what it was asked."""

    def __init__(self, browser: Chromium) -> None:
        self.browser, self.asked = browser, 0
        self.server = PageServer(lambda: served_page(explore.start_of_form(explore.START)), self.answer)
        Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, options: Any) -> dict[str, Any]:
        self.asked += 1
        return explore.answer(options)

    def show(self, options: dict[str, Any]) -> None:
        """As the form would: set its fields, press the button, wait for the charts."""
        self.browser.run(f"explore.form.set({json.dumps(options)})\nawait explore.form.ask()")

    @property
    def error(self) -> str:
        return str(self.browser.run('document.getElementById("error").textContent'))

    @property
    def details(self) -> str:
        return str(self.browser.run('document.getElementById("details").innerText'))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    needs_chromium()
    with Chromium(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture(scope="module")
def shared_page(browser: Chromium) -> Iterator[Page]:
    made = Page(browser)
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def page(shared_page: Page) -> Iterator[Page]:
    """Opened anew. No test may leave a complaint of a script behind."""
    shared_page.browser.problems.clear()
    shared_page.browser.requests.clear()
    shared_page.browser.open(shared_page.server.url)
    yield shared_page
    assert shared_page.browser.problems == []


def small_timeline(name: str = "ascending") -> Timeline:
    return simulate(generate(name, Problem.from_tiles("causal", 8, 8, heads=4), 8), Machine(compute=3, reduce=1))


def place_of(page: Page, chart: int, time: float, lane: int) -> tuple[float, float]:
    """Where a moment of a worker is on the screen."""
    x, y = page.browser.run(
        f"const chart = explore.state.charts[{chart}]\nconst box = chart.lower.getBoundingClientRect()\n"
        f"[box.left + chart.x({time}), box.top + chart.laneTop({lane}) + 0.3 * chart.laneHeight]"
    )
    return x, y


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
            ("window.explore =", f"{code}; window.explore =") if name == "throws.html" else ("<main>", "<script>planted</script><main>")
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


def test_hovering_names_a_task_and_whom_it_waits_for(page: Page) -> None:
    timeline = small_timeline()
    before = turn_predecessors(timeline.schedule)
    waits = timeline.execution.reduce_start - timeline.execution.compute_start - 3
    task = int(np.argmax(waits))
    worker = int(np.repeat(timeline.execution.worker, np.diff(timeline.execution.offsets))[task])
    x, y = place_of(page, 0, float(timeline.execution.compute_start[task]) + 1.5, worker)
    page.browser.mouse("mouseMoved", x, y)
    said = page.details
    assert said.splitlines()[0] == str(timeline.task(task))
    assert f"{timeline.task(int(before[task]))} until {timeline.execution.reduce_start[task]}, the last to come" in said
    (later,) = np.flatnonzero(before == task)[:1] if (before == task).any() else [None]
    waited_by = said.partition("Waited for by")[2]
    assert (str(timeline.task(int(later))) in waited_by) if later is not None else True
    page.browser.mouse("mouseMoved", 2, 2)
    assert "Point at a task" in page.details


@pytest.mark.parametrize("overlap", [0, 2])
def test_all_links_are_those_of_the_schedule(page: Page, overlap: int) -> None:
    """Whom each task waits for by turn, and who waits for it: the same pairs from both ends, as the simulator has them."""
    page.show({"mask": "causal", "q-tiles": "8", "kv-tiles": "4", "heads": "2", "group": "2", "workers": "3", "overlap": str(overlap)})
    schedule = generate("auto", Problem.from_tiles("causal", 8, 4, heads=2, group=2), 3)
    before = turn_predecessors(schedule).tolist()
    found, backwards = page.browser.run(
        "const { run } = explore.state.charts[0]\nconst all = [...Array(run.items).keys()]\n"
        "[all.map((i) => run.needs(i).find((n) => n.words.startsWith('turn'))?.item ?? -1),"
        " all.map((i) => all.filter((j) => run.neededBy(j).some((n) => n.item === i && n.words.startsWith('turn')))[0] ?? -1)]"
    )
    assert found == before == backwards


LATE = """
const { run } = explore.state.charts[0]
const wrong = []
for (let i = 0; i < run.items; i++) {
  for (const need of run.needs(i).filter((found) => found.last)) {
    const start = run.span(i, need.phase)[0]
    if (Math.abs(need.at - start) > 1e-9) wrong.push([run.title(i), need.words, need.at, start])
  }
}
return wrong
"""


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_an_event_begins_when_the_last_of_its_needs_has_come(page: Page, overlap: int) -> None:
    """Without start-ups, to the tick. So what the page calls the last to come is what decided."""
    machine = {"compute": "2", "reduce": "0.7", "overlap": str(overlap), "latency": "1.5"}
    page.show({"mask": "causal", "q-tiles": "12", "kv-tiles": "6", "heads": "3", "workers": "5", "schedule": "ascending", **machine})
    assert page.browser.run(LATE) == []
    page.show({"mask": "causal", "q-tiles": "12", "kv-tiles": "6", "heads": "3", "workers": "5", **machine, "startup": "2"})
    assert page.browser.run(LATE) != []  # the control: the first compute of a chain waits for its start-up, too


@pytest.mark.parametrize("name", ["ascending", "alternating"])
def test_the_critical_path_is_the_simulators(page: Page, name: str) -> None:
    timeline = small_timeline(name)
    chart = ["ascending", "alternating"].index(name)
    path = page.browser.run(
        f"const {{ run }} = explore.state.charts[{chart}]\nrun.path.map((e) => [run.title(e.item), PHASES_OF[e.phase], e.cause])".replace(
            "PHASES_OF", "['compute', 'reduce', 'add']"
        )
    )
    assert path == [[str(hop.task), hop.phase, hop.cause] for hop in timeline.critical_path]
    page.browser.run(f"explore.state.charts[{chart}].lower.focus()")
    visited = []
    for _ in range(5):
        page.browser.press("c")
        visited.append(page.details.splitlines()[0])
    tasks = list(dict.fromkeys(str(hop.task) for hop in timeline.critical_path))
    assert visited == tasks[:5]
    page.browser.press("C")
    assert page.details.splitlines()[0] == tasks[3]


def path_of(browser: Chromium, file: Path, run: dict[str, Any]) -> list[tuple[str, int, str]]:
    """What a page finds where the simulator has no exact path: phases, tasks or units, causes."""
    file.write_text(saved_page({"title": [], "refused": [], "command": "", "runs": [run]}))
    browser.problems.clear()
    browser.open(file.as_uri())
    found = browser.run("explore.state.charts[0].run.path.map((e) => [e.phase ? 'reduce' : 'compute', e.item, e.cause])")
    assert browser.problems == []
    return [tuple(event) for event in found]


@pytest.mark.parametrize("machine", [Machine(compute=3, reduce=1), Machine(compute=2, reduce=0.5, overlap=2)])
def test_the_path_of_a_record_has_no_holes(browser: Chromium, tmp_path: Path, machine: Machine) -> None:
    """A simulation without latencies is a recording in which each event begins when the last of its needs has ended."""
    timeline = simulate(generate("ascending", Problem.from_tiles("causal", 8, 4, heads=3), 5), machine)
    spans = times_of(timeline)
    noted = Noted(spans.worker_of_task, spans.compute_start, spans.compute_end, spans.reduce_start, spans.reduce_end)
    times = times_from(timeline.schedule, noted, machine.overlap)
    sent = recorded(timeline.schedule, times)
    assert sent["source"] == "measured"
    path = path_of(browser, tmp_path / "page.html", sent)
    begin = [float(getattr(times, f"{phase}_start")[index]) for phase, index, _ in path]
    end = [float(getattr(times, f"{phase}_end")[index]) for phase, index, _ in path]
    assert begin == pytest.approx([0.0, *end[:-1]])
    assert end[-1] == timeline.makespan
    assert path[0][2] == "start"
    assert "turn" in {cause for *_, cause in path}


def test_a_late_task_is_on_the_path_of_a_record(browser: Chromium, tmp_path: Path) -> None:
    timeline = simulate(generate("alternating", Problem.from_tiles("causal", 8, 4, heads=3), 5), Machine(compute=3, reduce=1))
    spans = times_of(timeline)
    last = int(np.argmax(spans.reduce_end))
    assert path_of(browser, tmp_path / "page.html", recorded(timeline.schedule, spans))[-1][:2] == ("reduce", last)
    other = (last + 7) % len(spans.reduce_end)
    later = spans.reduce_end.copy()
    later[other] += 1000
    noted = Noted(spans.worker_of_task, spans.compute_start, spans.compute_end, spans.reduce_start, later)
    sent = recorded(timeline.schedule, times_from(timeline.schedule, noted, 0))
    assert path_of(browser, tmp_path / "page.html", sent)[-1][:2] == ("reduce", other)


@pytest.mark.parametrize("execution", ["launch", "overlap"])
def test_the_path_of_ranks(browser: Chromium, tmp_path: Path, execution: str) -> None:
    shared = share(generate("auto", Problem(Causal(), 2048, 2048, heads=4), 16), Sharding.zigzag(2048, 2), 2)
    run = simulate_ranks(shared, Cluster(workers=16), execution)
    path = path_of(browser, tmp_path / "page.html", shared_run(run))
    assert path[0][2] == "keys"  # gathered before anything runs
    assert path[-1][1] == int(np.argmax(run.end))
    starts = [float(run.start[number]) for _, number, _ in path]
    assert starts == sorted(starts)
    if execution == "launch":  # each ends before the next one starts
        assert all(run.end[a] <= run.start[b] + 0.02 for (_, a, _), (_, b, _) in pairwise(path))


def test_one_rank_starts_at_once(browser: Chromium, tmp_path: Path) -> None:
    problem = Problem(Causal(), 1024, 1024, heads=2)
    run = simulate_ranks(share(generate("auto", problem, 8), Sharding.zigzag(1024, 1), 1), Cluster(workers=8))
    assert path_of(browser, tmp_path / "page.html", shared_run(run))[0][2] == "start"


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
    assert roles.count("application") == 2
    assert {"button", "combobox", "textbox", "slider", "alert", "main", "complementary"} <= set(roles)
    assert [role for role, name in named if role in NAMED - {"group"} and not name.strip()] == []
    (chart, _) = [name for role, name in named if role == "application"]
    assert "8 workers" in chart
    assert "makespan 135" in chart
    assert page.browser.run("document.documentElement.lang") == "en"
    assert page.browser.run('document.getElementById("spoken").getAttribute("aria-live")') == "polite"


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
    assert [theme for theme, _ in seen] == ["light", "dark", "light"]
    assert seen[0][1] != seen[1][1]


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
