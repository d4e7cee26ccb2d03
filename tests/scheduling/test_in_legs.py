"""Walks cut into legs: every schedule on any number of workers of one rank, in few legs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from dash_attn import Causal, Full, Mask, Prefix, ScheduleError, Window
from dash_attn.call.planning import plan_on_any
from dash_attn.scheduling import Problem, Schedule, generate
from dash_attn.scheduling.order import HeadOrder, Order, turn_within
from dash_attn.scheduling.ranks.sharding import Sharding
from dash_attn.scheduling.ranks.share import in_legs, share
from dash_attn.scheduling.ranks.units import Circle, SharedSchedule, trips_of
from dash_attn.scheduling.validate import StuckOnWorkers, TooFewWorkers

ENOUGH = 1000

# name, mask, queries, keys -> gang, chunks of the queries
LEAST_CUTS: list[tuple[str, Mask, int, int, int, int]] = [
    ("auto", Full(), 1000, 1000, 8, 2),
    ("auto", Full(), 2176, 2176, 9, 2),
    ("auto", Full(), 1290, 2450, 10, 2),
    ("auto", Full(), 2450, 1010, 8, 2),
    ("shift", Full(), 2176, 2176, 17, 2),
    ("symmetric_shift", Causal(), 2200, 2200, 9, 2),
    ("symmetric_shift", Causal(), 2176, 2176, 9, 32),
    ("arrival", Prefix(500), 2176, 2176, 4, 4),
    ("arrival", Window(300, 40), 2176, 2176, 17, 32),
    ("alternating", Causal(), 1000, 1000, 1, 1),
]


def drawn(problem: Problem, seed: int) -> Schedule:
    """Walks and turns follow one sequence of all tasks, drawn at random: there is no circle, but chains wait for each other."""
    kv_tile, q_tile = np.nonzero(problem.kept.T)
    turn = np.random.default_rng(seed).permutation(len(q_tile))
    by_walk = np.lexsort((turn, kv_tile))
    kv_tile, q_tile, turn = kv_tile[by_walk], q_tile[by_walk], turn[by_walk]
    kind = HeadOrder.build(kv_tile, q_tile, turn_within(q_tile, turn), np.zeros(problem.kv_tiles, dtype=np.int64))
    return Schedule.build(problem, Order("drawn", (kind,)), (np.arange(problem.kv_tiles),), ENOUGH)


def run_by_one_worker(legs: SharedSchedule) -> int:
    """Walk all units one after another, chain by chain. Returns how many tasks there were; none may come before its turn."""
    schedule, landed, walked = legs.schedule, defaultdict[tuple[int, ...], int](int), defaultdict[tuple[int, ...], int](int)
    ended = set()
    for unit in legs.units:
        for sequence, part in unit.heads:
            if unit.leg is None:
                ended |= {(sequence, part, kv_tile) for kv_tile in legs.column_of(unit).kv_tiles}
                continue
            order = schedule.order_of(part)
            for kv_tile in legs.leg_of(unit).kv_tiles:
                steps = legs.trips[unit.kind].steps(kv_tile, unit.leg)
                assert walked[sequence, part, unit.member, kv_tile] == steps.start, "the walk goes on where it rested"
                for q_tile, turn in zip(order.walk(kv_tile)[steps].tolist(), order.turns(kv_tile)[steps].tolist(), strict=True):
                    assert landed[sequence, part, unit.member, q_tile] == turn
                    landed[sequence, part, unit.member, q_tile] += 1
                walked[sequence, part, unit.member, kv_tile] = steps.stop
    assert len(ended) == schedule.problem.chains
    return sum(landed.values())


@pytest.mark.parametrize(("name", "mask", "q_len", "kv_len", "gang", "chunks"), LEAST_CUTS)
def test_the_least_cut(name: str, mask: Mask, q_len: int, kv_len: int, gang: int, chunks: int) -> None:
    """A cut of the queries alone: keys may be of another length."""
    schedule = generate(name, Problem(mask, q_len, kv_len, heads=2, group=3, batch=2), ENOUGH)
    legs = in_legs(schedule, 2)
    assert (schedule.gang, legs.sharding.chunks) == (gang, chunks)
    assert (legs.sharding.ranks, legs.sharding.rows, legs.heads_together) == (1, q_len, 2)
    assert run_by_one_worker(legs) == schedule.problem.tasks
    if gang > 1:
        with pytest.raises(TooFewWorkers):
            generate(name, schedule.problem, 2) if name != "shift" else Schedule.build(
                schedule.problem, schedule.order, schedule.placement.starts, 2
            )


@pytest.mark.parametrize("mask", [Full(), Causal(), Window(100, 200)], ids=str)
def test_any_order_without_a_circle_can_be_cut(mask: Mask) -> None:
    for seed in range(20):
        schedule = drawn(Problem(mask, 600, 700, heads=2), seed)
        assert schedule.gang > 1
        assert run_by_one_worker(in_legs(schedule, 3)) == schedule.problem.tasks


def test_where_chains_cannot_travel_together_each_travels_alone() -> None:
    """Chains 0 and 1 have one route; on the first Q tile chain 2 comes between them, and on the second before both."""
    problem = Problem.from_tiles("full", 2, 3)
    kind = HeadOrder.build([0, 0, 1, 1, 2, 2], [0, 1, 0, 1, 1, 0], [0, 1, 2, 2, 0, 1], [0, 0, 0])
    schedule = Schedule.build(problem, Order("between", (kind,)), ([0, 2, 1],), 3)
    with pytest.raises(Circle):
        trips_of(schedule, Sharding((problem.tile_q,) * 2, (0, 0)))
    legs = in_legs(schedule, 1)
    assert [column.kv_tiles for column in legs.trips[0].columns] == [(0,), (1,), (2,)]
    assert run_by_one_worker(legs) == 6


def test_keys_of_another_length_are_for_one_rank() -> None:
    schedule = generate("auto", Problem(Full(), 512, 1024), ENOUGH)
    with pytest.raises(ValueError, match="queries and keys of a sharded sequence are the same 512 rows"):
        share(schedule, Sharding.contiguous(512, 2))
    assert Sharding((256, 256), (0, 0)).chunk_of_kv_tiles(schedule.problem).tolist() == [0] * 8
    assert Sharding.contiguous(1024, 2).chunk_of_kv_tiles(Problem(Full(), 1024, 1024)).tolist() == [0] * 4 + [1] * 4


def test_whole_chains_where_the_workers_are_enough() -> None:
    problem = Problem(Full(), 2176, 2176)
    assert [plan_on_any(problem, "auto", workers).legs is None for workers in (8, 9, 132)] == [False, True, True]
    hashes = {plan_on_any(problem, "auto", workers).plan.order_hash for workers in (1, 8, 9, 132)}
    assert len(hashes) == 1
    assert plan_on_any(problem, "auto", 2).plan.workers == 2
    assert plan_on_any(problem, "alternating", 1).legs is None
    assert plan_on_any(problem, "shift", 2).legs is None, "it takes another order instead"
    with pytest.raises(ScheduleError, match="serves full masks only"):
        plan_on_any(replace(problem, mask=Causal()), "shift_blocks", 2)


def test_a_torn_gang_rests_too() -> None:
    """Nine chains in segments of five and four, three heads: eleven workers hold no whole gang, though there is room for one."""
    schedule = generate("shift_blocks", Problem(Full(), 1152, 1152, heads=3), 100)
    assert schedule.gang == 9
    torn = Schedule(schedule.problem, schedule.order, replace(schedule.placement, segments=(5, 4), lanes=1))
    with pytest.raises(StuckOnWorkers, match="would deadlock on 11 workers") as caught:
        replace(torn, placement=replace(torn.placement, workers=11))
    assert not isinstance(caught.value, TooFewWorkers)
    legs = plan_on_any(schedule.problem, torn.to_json(), 11).legs
    assert legs is not None
    assert run_by_one_worker(legs) == schedule.problem.tasks


def test_a_circle_of_tasks_stays_an_error() -> None:
    problem = Problem.from_tiles("full", 2, 2)
    kind = HeadOrder.build([0, 0, 1, 1], [0, 1, 1, 0], [1, 0, 1, 0], [0, 0])
    with pytest.raises(ScheduleError, match="on any number of workers: its walks and turns wait for each other in a circle") as caught:
        Schedule.build(problem, Order("stuck", (kind,)), ([0, 1],), 2)
    assert not isinstance(caught.value, StuckOnWorkers)
