"""A schedule on several ranks, without tensors: its legs are the whole walks, and its units wait in no circle."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from dash_attn import Causal, Documents, Full, Mask, Prefix, ScheduleError, TileMap, Window
from dash_attn.scheduling import Problem, Schedule, generate
from dash_attn.scheduling.order import ALL_GUARANTEES, Order
from dash_attn.scheduling.ranks.sharding import SHARDINGS, Sharding
from dash_attn.scheduling.ranks.share import share
from dash_attn.scheduling.ranks.units import Circle, SharedSchedule, trips_of
from shared_problems import random_sharding
from strategies import acyclic_order
from unit_walks import OutOfTurn, any_order, run

WORKERS = 132


def random_mask(random: Random, rows: int) -> Mask:
    width, tiles = random.randint(1, rows - 1), -(-rows // 128)
    masks: list[Mask] = [
        Causal(),
        Full(),
        Window(width, 0),
        Window(random.randint(0, rows), random.randint(0, rows)),
        Window(-1, width),
        Window(width, -1),
        Prefix(width),
        Documents((width, rows - width), True),
        TileMap(np.random.default_rng(width).random((tiles, tiles)) < random.choice([0.3, 0.6, 0.9]), 128, 128),
    ]
    return random.choice(masks)


def random_problem(seed: int) -> tuple[Problem, Sharding, int]:
    """And how many heads go side by side."""
    random = Random(seed)
    ranks = random.choice([1, 2, 3, 4, 5, 8])
    named = Sharding.named(random.choice(["zigzag", "contiguous"]), 256 * ranks * random.randint(1, 2), ranks)
    sharding = random.choice([named, random_sharding(random, ranks, most=4)])
    heads, group, batch, offset = random.randint(1, 4), random.randint(1, 3), random.randint(1, 2), random.randint(0, 3)
    problem = Problem(
        random_mask(random, sharding.rows), sharding.rows, sharding.rows, random.choice([64, 128]), 128, heads, group, batch, offset
    )
    return replace(problem, group_parts=random.randint(0, group)), sharding, random.randint(1, 3)


def check(shared: SharedSchedule, random: Random) -> None:
    problem = shared.problem
    assert all(earlier < unit.number for unit in shared.units for earlier in shared.waits[unit.number])
    assert sum(map(shared.tasks_of, shared.units)) == problem.tasks
    assert sorted(unit for units in shared.by_rank for unit in units) == sorted(shared.units)
    for trips, order in zip(shared.trips, shared.schedule.order.kinds, strict=True):
        assert sorted(kv_tile for column in trips.columns for kv_tile in column.kv_tiles) == list(range(order.kv_tiles))
        for kv_tile, bounds in trips.bounds.items():
            assert (bounds[0], bounds[-1]) == (0, len(order.walk(kv_tile)))
    for units in (shared.units, any_order(shared, random), any_order(shared, random)):
        assert run(shared, units) == problem.tasks


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("name", ["auto", "alternating"])
def test_any_mask_on_any_ranks_waits_in_no_circle(name: str, seed: int) -> None:
    problem, sharding, heads_together = random_problem(seed)
    check(share(generate(name, problem, WORKERS), sharding, heads_together), Random(seed))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(60, 600))
def test_many_masks_wait_in_no_circle(seed: int) -> None:
    problem, sharding, heads_together = random_problem(seed)
    if sharding.chunks == 1:
        pytest.skip("one chunk cuts no walk; one rank alone is test_in_legs.py's")
    for name in ("auto", "alternating"):
        check(share(generate(name, problem, WORKERS), sharding, heads_together), Random(seed))


def test_a_chain_between_two_of_one_route_makes_no_circle() -> None:
    """The second KV tile stays in the first chunk; the first and the third go on to the next. Together they would wait for it, and it
    for them."""
    blocks = np.ones((6, 6), dtype=np.bool_)
    blocks[1:, 1] = False
    problem, sharding = Problem(TileMap(blocks, 128, 128), 768, 768, 128, 128), Sharding((384, 384), (0, 1))
    schedule = generate("alternating", problem, WORKERS)
    with pytest.raises(Circle):
        trips_of(schedule, sharding)
    shared = share(schedule, sharding)
    check(shared, Random(0))
    columns = [column.kv_tiles for column in shared.trips[0].columns]
    assert {(0,), (1,), (2,)} <= set(columns)


def drawn(problem: Problem, seed: int, guarantees: tuple[str, ...]) -> Schedule:
    """Walks and ranks that follow one random sequence of tasks."""
    order = Order("drawn", (acyclic_order(problem, np.random.default_rng(seed)),), guarantees)
    return Schedule.build(problem, order, (np.arange(problem.kv_tiles),), WORKERS)


def test_a_circle_raises_and_names_what_serves() -> None:
    problem, sharding = Problem(Full(), 1024, 1024, 64, 128), Sharding.contiguous(1024, 2)
    with pytest.raises(ScheduleError, match=r"drawn, kind 0: .* in a circle, .*kv.*schedule='alternating' serves every mask"):
        share(drawn(problem, 0, ALL_GUARANTEES), sharding)


def test_an_order_that_depends_on_workers_is_refused() -> None:
    schedule = generate("shift", Problem(Full(), 1024, 1024, 64, 128), WORKERS)
    with pytest.raises(ScheduleError, match=r"a function of the sequence alone; that of shift is not known to be\. Use schedule='auto'"):
        share(schedule, Sharding.zigzag(1024, 2))


def test_a_schedule_of_the_callers_own_is_refused() -> None:
    problem = Problem(Causal(), 512, 512, 64, 128)
    with pytest.raises(ScheduleError, match="that of drawn is not known to be"):
        share(drawn(problem, 0, ALL_GUARANTEES[:1]), Sharding.contiguous(512, 2))


def test_units_out_of_turn_are_found() -> None:
    """The control of these tests: two units swapped, one left out, one twice."""
    shared = share(generate("auto", Problem(Causal(), 1024, 1024, 64, 128, 2), WORKERS), Sharding.zigzag(1024, 2))
    units = list(shared.units)
    later, earlier = next(
        (unit.number, waits[-1]) for unit, waits in zip(units, shared.waits, strict=True) if waits and unit.before is None
    )
    swapped = units.copy()
    swapped[later], swapped[earlier] = swapped[earlier], swapped[later]
    for wrong in (swapped, units[:5] + units[6:], [*units[:6], *units[5:]]):
        with pytest.raises(OutOfTurn):
            run(shared, wrong)


@pytest.mark.parametrize("lengths", [(128, 100, 128), (64, 128)])
def test_chunks_that_cut_a_tile_are_refused(lengths: tuple[int, ...]) -> None:
    rows = sum(lengths)
    with pytest.raises(
        ValueError, match=r"chunks must be multiples of 128 rows, .*\(the last chunk may end anywhere\); got a chunk of (100|64)"
    ):
        share(generate("auto", Problem(Causal(), rows, rows, 64, 128), WORKERS), Sharding(lengths, tuple(range(len(lengths)))))


@pytest.mark.parametrize("name", SHARDINGS)
def test_more_ranks_than_rows_are_refused_before_anything_is_made_for_them(name: str) -> None:
    with pytest.raises(ValueError, match="1,024 rows cannot be dealt to 1,000,000,000 ranks"):
        Sharding.named(name, 1024, 10**9)
    with pytest.raises(ValueError, match="1 row cannot be dealt to 4 ranks"):
        Sharding.named(name, 1, 4)


def test_a_rank_far_beyond_the_others_takes_no_memory() -> None:
    with pytest.raises(ValueError, match="every rank needs a chunk; rank 1 of 1000000000000 has none"):
        Sharding((128, 128), (0, 10**12 - 1))


def test_queries_and_keys_are_the_same_rows() -> None:
    with pytest.raises(ValueError, match="the same 512 rows; got 512 queries and 1024 keys"):
        share(generate("auto", Problem(Full(), 512, 1024, 64, 128), WORKERS), Sharding.contiguous(512, 2))
