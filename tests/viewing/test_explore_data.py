"""Runs as a page gets them: the numbers of the simulator, the page as one file."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dash_attn import Causal
from dash_attn.scheduling import GENERATORS, Problem, generate
from dash_attn.scheduling.generators import IDEAS
from dash_attn.scheduling.ranks.sharding import Sharding
from dash_attn.scheduling.ranks.share import share
from dash_attn.simulation import Machine, simulate
from dash_attn.simulation.cluster import Cluster, simulate_ranks
from dash_attn.viewing.explore import runs
from dash_attn.viewing.explore.runs import EXACT, encoded, shared_run
from dash_attn.viewing.explore.server import as_text, saved_page, served_page
from dash_attn.viewing.task_times import task_table, times_of
from dash_attn.viewing.words import FIGURES, figures_of, figures_of_ranks

KINDS = {"B": "u1", "H": "<u2", "i": "<i4", "d": "<f8"}
PLAIN = Machine(compute=3, reduce=1)
BACKGROUND = Machine(compute=2, reduce=0.5, overlap=2, latency=1.5, startup=4)


def decoded(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text[1:]), KINDS[text[0]])


def timeline_of(machine: Machine, name: str = "ascending", **rest: int) -> Any:
    return simulate(generate(name, Problem.from_tiles("causal", 8, 4, **{"heads": 3, **rest}), 5), machine)


@pytest.mark.parametrize(
    ("values", "letter"), [([], "B"), ([0, 255], "B"), ([256], "H"), ([-1, 3], "i"), ([2**31 - 1], "i"), ([2**31], "d"), ([-(2**53)], "d")]
)
def test_arrays_travel_in_the_smallest_type(values: list[int], letter: str) -> None:
    text = encoded(np.array(values, dtype=np.int64))
    assert text[0] == letter
    assert decoded(text).tolist() == values


def test_what_no_page_could_hold_exactly_is_refused() -> None:
    with pytest.raises(OverflowError):
        encoded(np.array([EXACT + 1]))


@pytest.mark.parametrize("machine", [PLAIN, BACKGROUND])
def test_a_simulated_run_keeps_every_tick(machine: Machine) -> None:
    timeline = timeline_of(machine)
    sent = runs.simulated(timeline, "ascending")
    tasks = {name: decoded(text).astype(np.int64) for name, text in sent["tasks"].items()}
    run, table = timeline.execution, task_table(timeline.schedule)
    computed = tasks["compute_start"] + tasks["compute"]
    assert set(tasks["compute"].tolist()) == {machine.costs.compute}
    assert tasks["compute_start"].tolist() == run.compute_start.tolist()
    assert (computed + tasks["delay"]).tolist() == run.reduce_start.tolist()
    assert (tasks["q_tile"].tolist(), tasks["turn"].tolist()) == (table.q_tile.tolist(), table.turn.tolist())
    lost = float(tasks["lost"].sum()) / machine.ticks_per_unit
    assert lost == pytest.approx(timeline.stalled * timeline.makespan * 5)
    assert sent["makespan"] / sent["ticks"] == timeline.makespan
    assert dict(map(tuple, sent["figures"]))["gang"] == "1"


def test_the_end_of_a_run_is_behind_its_sums() -> None:
    """Chains of parts add dK and dV behind their tasks."""
    timeline = simulate(generate("auto", Problem(Causal(), 1024, 1024, heads=2, group=16), 16), BACKGROUND)
    sent = runs.simulated(timeline, "auto")
    assert sent["adds"]["count"] == timeline.schedule.problem.adds > 0
    assert sent["makespan"] / sent["ticks"] == timeline.makespan > times_of(timeline).makespan
    assert sent["name"] == "auto: alternating"


def test_a_large_problem_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ValueError, match=r"at most 2,000,000 tasks per schedule; got 2,000,001"):
        runs.check_size(2_000_001)


@pytest.mark.parametrize("execution", ["launch", "overlap"])
def test_units_of_ranks(execution: str) -> None:
    problem = Problem(Causal(), 2048, 2048, heads=4)
    shared = share(generate("auto", problem, 16), Sharding.zigzag(2048, 2), 2)
    run = simulate_ranks(shared, Cluster(workers=16), execution)
    sent = shared_run(run)
    units = {name: decoded(text) for name, text in sent["units"].items() if isinstance(text, str)}
    assert units["rank"].tolist() == [unit.rank for unit in shared.units]
    assert units["start"] / 1000 == pytest.approx(run.start, abs=0.001)
    assert sent["units"]["does"] == [shared.describe(unit) for unit in shared.units]
    counts, waits = decoded(sent["waits"]["count"]), decoded(sent["waits"]["unit"])
    assert counts.sum() == len(waits)


def policy_of(page: str) -> str:
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    return policy


def hash_of(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def test_a_saved_page_is_one_file_with_all_in_it() -> None:
    answer = {"runs": [runs.simulated(timeline_of(PLAIN), "ascending")], "title": ["</script><b>{{data}}"]}
    page = saved_page(answer)
    assert page == saved_page(answer)
    ((encoding, data),) = re.findall(r'id="data" data-encoding="(\w+)">(.*?)</script>', page, re.S)
    assert encoding == "plain"
    assert json.loads(data) == answer
    (script,) = re.findall(r'<script type="module">(.*?)</script>', page, re.S)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.S)
    assert f"'sha256-{hash_of(script)}'" in policy_of(page)
    assert f"'sha256-{hash_of(style)}'" in policy_of(page)
    assert "connect-src 'none'" in policy_of(page)
    assert "unsafe" not in policy_of(page)
    assert not re.findall(r"https?://", page)
    assert page.count("{{") == 1  # of the title, which is not looked at again


def test_large_data_are_compressed() -> None:
    answer = {"text": "x" * 300_000}
    ((encoding, data),) = re.findall(r'id="data" data-encoding="(\w+)">(.*?)</script>', saved_page(answer), re.S)
    assert encoding == "gzip"
    assert gzip.decompress(base64.b64decode(data)).decode() == as_text(answer)


def test_a_served_page_may_ask_its_server_alone() -> None:
    page = served_page({"options": {}})
    assert "connect-src 'self'" in policy_of(page)
    assert 'data-encoding="form"' in page


def test_every_figure_and_schedule_has_a_sentence() -> None:
    """On the page, and the same on the page of the docs."""
    shared = share(generate("auto", Problem(Causal(), 1024, 1024, heads=2), 8), Sharding.zigzag(1024, 2), 1)
    shown = {**figures_of(timeline_of(PLAIN)), **figures_of_ranks(simulate_ranks(shared, Cluster(workers=8)))}
    assert set(shown) == set(FIGURES)
    assert set(IDEAS) == {"auto", *GENERATORS}
    assert "`" not in "".join([*FIGURES.values(), *IDEAS.values()])  # the page shows them as they are
    docs = (Path(__file__).parents[2] / "docs" / "explore.md").read_text()
    missing = [name for name, words in {**FIGURES, **IDEAS}.items() if f"| {words} |" not in docs]
    assert missing == []
