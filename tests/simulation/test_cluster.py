"""The simulated cluster: the efficiencies of the chunk model, the rules that no run may break, and one rank as the simulator knows it."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from clusters import blocks, random_shared, shared
from dash_attn import parse_mask
from dash_attn.scheduling import Problem, generate
from dash_attn.scheduling.ranks.sharding import Sharding
from dash_attn.scheduling.ranks.share import heads_that_fill, share
from dash_attn.scheduling.ranks.units import SharedSchedule
from dash_attn.simulation import Machine, simulate
from dash_attn.simulation.cluster import (
    EXECUTIONS,
    MODELS,
    MOST_TASKS_OF_TILES,
    Cluster,
    RankTimeline,
    Widths,
    simulate_ranks,
)
from dash_attn.simulation.cluster.timeline import TileModel
from dash_attn.simulation.machines import H200

SIMULATOR_PAGE = Path(__file__).parents[2] / "docs/simulator.md"
RANKS = (2, 4, 8, 16)
ROWS = 1024  # of a chunk
BLOCK = ROWS // 64 * ROWS // 128  # tasks where a chunk of queries meets one of keys


def in_chunks(found: SharedSchedule, hop: float = 0.0) -> RankTimeline:
    """A hop in blocks of one head."""
    return simulate_ranks(found, blocks(hop * BLOCK * found.heads_together), "launch", "chunks")


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("heads", [2, 4, 8])
def test_one_head_of_each_kind_keeps_all_ranks_busy(ranks: int, heads: int) -> None:
    run = in_chunks(shared("causal", 2 * ranks * ROWS, ranks, heads))
    assert run.efficiency == run.work_efficiency == 1.0
    assert max(run.waiting) <= 3


@pytest.mark.parametrize(("ranks", "efficiency"), [(2, 0.80), (4, 0.73), (8, 0.70), (16, 0.68)])
def test_one_head_alone_leaves_ranks_idle(ranks: int, efficiency: float) -> None:
    assert in_chunks(shared("causal", 2 * ranks * ROWS, ranks, 1)).efficiency == pytest.approx(efficiency, abs=0.01)


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize(("heads", "efficiency"), [(3, 0.875), (5, 0.925), (7, 0.945)])
def test_an_odd_head_costs_half_a_pair(ranks: int, heads: int, efficiency: float) -> None:
    assert in_chunks(shared("causal", 2 * ranks * ROWS, ranks, heads), hop=0.05).efficiency == pytest.approx(efficiency, abs=0.015)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("heads", [1, 8])
def test_contiguous_rows_are_as_busy_as_the_last_rank(ranks: int, heads: int) -> None:
    found = shared("causal", ranks * ROWS, ranks, heads, "contiguous")
    last = sum(found.tasks_of(unit) for unit in found.by_rank[-1])
    assert in_chunks(found).efficiency == pytest.approx(found.problem.tasks / ranks / last)
    assert in_chunks(found).efficiency == pytest.approx(ranks / (2 * ranks - 1), abs=0.015)


@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_heads_of_one_kind_fill_and_drain_the_pipeline(ranks: int) -> None:
    """The control of the alternation: all heads walk the same way."""
    assert in_chunks(shared("causal", 2 * ranks * ROWS, ranks, 2, schedule="descending")).efficiency < 0.85


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("heads", [2, 8])
def test_hops_hide_behind_other_units(ranks: int, heads: int) -> None:
    """The sequence expects them. One that does not loses 7 to 11 % here."""
    assert in_chunks(shared("causal", 2 * ranks * ROWS, ranks, heads), hop=0.2).efficiency > 0.98


@pytest.mark.parametrize(("rows", "heads", "least"), [(8192, 8, 0.91), (8192, 16, 0.95), (32768, 8, 0.97)])
def test_heads_of_a_full_mask_take_turns_on_the_ranks(rows: int, heads: int, least: float) -> None:
    """Head after head it would be 0.865, 0.889 and 0.901."""
    run = in_chunks(shared("full", rows, 4, heads, "contiguous"))
    assert run.efficiency >= least
    assert max(run.waiting) <= 10


def test_units_side_by_side_fill_workers() -> None:
    """Eight chains on sixteen workers take as long as on eight. Overlapped, the next unit takes the other eight."""
    machine = Machine(compute=1, reduce=0)
    found, wide = (shared("causal", 2 * 2 * ROWS, 2, 4, together=together) for together in (1, 2))
    times = {
        (workers, together, execution): simulate_ranks(each, Cluster(machine, workers, 0, math.inf), execution, "chunks").makespan
        for workers in (8, 16)
        for together, each in ((1, found), (2, wide))
        for execution in EXECUTIONS
    }
    assert times[16, 1, "launch"] == times[8, 1, "launch"]
    assert times[16, 2, "launch"] == times[8, 2, "launch"] / 2
    assert times[16, 1, "overlap"] < 0.7 * times[16, 1, "launch"]


def assert_in_order(run: RankTimeline) -> None:
    found, latency = run.shared, run.cluster.hop_latency_us
    start, end, arrival = run.start.tolist(), run.end.tolist(), run.arrival.tolist()
    for unit in found.units:
        number = unit.number
        assert arrival[number] <= start[number] <= end[number] <= run.makespan
        if unit.before is not None:
            hops = found.units[unit.before].rank != unit.rank
            assert arrival[number] >= end[unit.before] + (latency if hops else 0)
        if run.execution == "launch" or unit.leg is None:
            assert all(end[other] <= start[number] for other in found.waits[number])
    for units in found.by_rank:
        for before, after in pairwise(unit.number for unit in units if run.execution == "launch" or unit.leg is not None):
            assert (end if run.execution == "launch" else start)[before] <= start[after]


@pytest.mark.parametrize("seed", range(40))
def test_no_unit_runs_before_its_states_and_ranks(seed: int) -> None:
    found = random_shared(seed)
    machine = H200[128] if seed % 2 else Machine(compute=1, reduce=0.3)
    for model in MODELS:
        for execution in EXECUTIONS:
            run = simulate_ranks(found, Cluster(machine, hop_latency_us=7 * (seed % 3), bandwidth_GBs=50), execution, model)
            assert_in_order(run)
            assert 0 < run.work_efficiency <= 1


@pytest.mark.parametrize("seed", range(40))
def test_trips_go_on_until_their_end(seed: int) -> None:
    """Each unit hands its states to a later one, and all tasks of the schedule are done once."""
    found = random_shared(seed)
    for unit in found.units:
        assert unit.before is None or (unit.before < unit.number and found.units[unit.before].after == unit.number)
        assert (unit.after is None) == (unit.leg is None)
    assert sum(map(found.tasks_of, found.units)) == found.problem.tasks
    model = TileModel(found, Cluster(), overlap=bool(seed % 2))
    for unit in found.units:
        model.run(unit, 0.0)
    problem = found.problem
    turns = np.tile(problem.turns_per_q_tile, problem.batch * problem.heads * problem.group)
    assert model.reduces.landed == turns.tolist()


def test_a_wrong_sequence_is_noticed() -> None:
    """The control of the above: a unit whose turns have not come."""
    found = shared("causal", 1024, 2, 2)
    late = next(unit for unit in found.units if unit.leg is not None and unit.before is None and found.waits[unit.number])
    with pytest.raises(AssertionError, match="behind those that it waits for"):
        TileModel(found, Cluster(), overlap=False).run(late, 0.0)


@pytest.mark.parametrize("machine", [H200[128], Machine(compute=3, reduce=1), Machine(compute=2, reduce=5, overlap=3, latency=7)], ids=str)
@pytest.mark.parametrize("mask", ["causal", "window:700,0"])
def test_one_rank_is_the_simulator(mask: str, machine: Machine) -> None:
    """One head: a unit has all its chains. Two heads: overlapped units are its tickets."""
    one = share(generate("auto", Problem(parse_mask(mask), 4096, 4096), 7), Sharding.contiguous(4096, 1))
    for execution in EXECUTIONS:
        run = simulate_ranks(one, Cluster(machine, 7), execution)
        assert run.makespan == run.one_rank == simulate(one.schedule, machine).makespan
    two = share(generate("auto", Problem(parse_mask(mask), 4096, 4096, heads=2), 20), Sharding.contiguous(4096, 1))
    assert [len(kind) for kind in two.schedule.placement.heads_of_kinds(two.problem)] == [1, 1]
    overlap, launch = (simulate_ranks(two, Cluster(machine, 20), execution) for execution in ("overlap", "launch"))
    assert overlap.makespan == overlap.one_rank
    assert overlap.efficiency == 1.0
    assert launch.makespan >= overlap.makespan
    assert launch.sent == (0,)


def test_the_tile_model_finds_what_the_study_found() -> None:
    """Section 5 of the design: 16k tokens on four ranks, 32 heads, 16 side by side: 0.763 and 0.863 with hops of 10 us alone."""
    found = shared("causal", 16384, 4, 32, together=16)
    cluster = Cluster(bandwidth_GBs=math.inf)
    runs = [simulate_ranks(found, cluster, execution) for execution in EXECUTIONS]
    assert [run.work_efficiency for run in runs] == pytest.approx([0.763, 0.863], abs=0.005)
    row = "| 4, 16k, 32 and 32 | 16 | " + " | ".join(f"{run.efficiency:.3f}" for run in runs)
    assert row in SIMULATOR_PAGE.read_text()
    chunks = simulate_ranks(found, cluster, "launch", "chunks")
    assert chunks.work_efficiency > 0.95


def test_bytes_take_time() -> None:
    """The gather of the first heads comes before all work; a slow link holds up every hop."""
    found = shared("causal", 4096, 4, 4)
    fast, slow = (simulate_ranks(found, Cluster(hop_latency_us=3, bandwidth_GBs=width)) for width in (400, 1))
    keys = Widths().keys(4096 - 1024)
    assert fast.start[0] == pytest.approx(3 + keys / 400e3, abs=0.01)
    assert slow.start[0] == pytest.approx(3 + keys / 1e3, abs=0.01)
    sent = max(slow.states) / 1e3
    assert slow.makespan > sent > fast.makespan


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("model", MODELS)
def test_hops_cost_and_times_repeat(execution: str, model: str) -> None:
    found = shared("causal", 8192, 4, 4, together=2)
    spans = [simulate_ranks(found, Cluster(hop_latency_us=hop), execution, model) for hop in (0, 10, 100, 1000)]
    assert all(before.makespan < after.makespan for before, after in pairwise(spans))
    again = simulate_ranks(found, Cluster(hop_latency_us=10), execution, model)
    for name in ("start", "end", "arrival"):
        assert np.array_equal(getattr(again, name), getattr(spans[1], name))


def test_waiting_states_are_counted_between_arrival_and_start() -> None:
    found = shared("causal", 4096, 2, 2)
    run = simulate_ranks(found, blocks(), "launch", "chunks")
    most: dict[int, int] = defaultdict(int)
    for unit in found.units:
        moment = run.start[unit.number]
        there = [
            other
            for other in found.units
            if other.before is not None and run.arrival[other.number] < moment <= run.start[other.number] and other.rank == unit.rank
        ]
        most[unit.rank] = max(most[unit.rank], len([other for other in there if run.arrival[other.number] < run.start[other.number]]))
    assert run.waiting == tuple(most[rank] for rank in range(2))
    assert max(run.waiting_bytes) == max(run.waiting) * Widths().states(found.problem, 8)


@pytest.mark.parametrize(
    ("rows", "ranks", "heads", "together"),
    [(32768, 4, 32, 16), (32768, 2, 32, 8), (131072, 8, 32, 8), (16384, 4, 32, 16), (8192, 4, 1, 1), (32768, 4, 6, 3)],
)
def test_enough_heads_fill_the_workers(rows: int, ranks: int, heads: int, together: int) -> None:
    schedule = generate("auto", Problem(parse_mask("causal"), rows, rows, heads=heads), 132)
    assert heads_that_fill(schedule, Sharding.zigzag(rows, ranks), 132) == together


def test_full_masks_keep_units_for_all_ranks() -> None:
    schedule = generate("auto", Problem(parse_mask("full"), 8192, 8192, heads=16), 132)
    assert heads_that_fill(schedule, Sharding.contiguous(8192, 4), 132) == 4
    assert heads_that_fill(schedule, Sharding.contiguous(8192, 16), 132) == 1


def test_what_cannot_be_simulated_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = shared("causal", 1024, 2, 1)
    with pytest.raises(ValueError, match="unknown execution 'persistent'; choose from launch, overlap"):
        simulate_ranks(found, Cluster(), "persistent")
    with pytest.raises(ValueError, match="unknown model 'tile'; choose from tiles, chunks"):
        simulate_ranks(found, Cluster(), model="tile")
    with pytest.raises(ValueError, match="made for 132 workers; the cluster's ranks have 8"):
        simulate_ranks(found, Cluster(workers=8))
    monkeypatch.setattr("dash_attn.simulation.cluster.timeline.MOST_TASKS_OF_TILES", 10)
    with pytest.raises(ValueError, match=r"too many for the tile model; at most 10 \(model='chunks' takes more\)"):
        simulate_ranks(found, Cluster())
    assert MOST_TASKS_OF_TILES >= 2_105_344  # 32k tokens with 32 heads


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"workers": 0}, "workers"), ({"hop_latency_us": -1.0}, "hop_latency_us"), ({"bandwidth_GBs": 0.0}, "bandwidth_GBs")],
)
def test_impossible_clusters_are_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(Cluster(), **wrong)
    with pytest.raises(ValueError, match="dim_v"):
        Widths(dim_v=0)
