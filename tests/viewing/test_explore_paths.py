"""The page in headless Chromium: whom a task waits for, and the critical path of simulations, records and ranks."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chromium import Chromium
from dash_attn import Causal
from dash_attn.scheduling import Problem, generate
from dash_attn.scheduling.ranks.sharding import Sharding
from dash_attn.scheduling.ranks.share import share
from dash_attn.simulation import Machine, simulate
from dash_attn.simulation.cluster import Cluster, simulate_ranks
from dash_attn.simulation.critical_path import turn_predecessors
from dash_attn.viewing.explore.runs import recorded, shared_run
from dash_attn.viewing.explore.server import saved_page
from dash_attn.viewing.task_times import Noted, times_from, times_of
from explored_page import Page, place_of, small_timeline

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
    file.write_text(saved_page({"title": [], "refused": [], "command": "", "meanings": {}, "runs": [run]}))
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
