"""Plans: decoding gives the order back, tables are small, the hash names the bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases import SERVED
from dash_attn import Causal, Documents, Full, Mask, Prefix, ScheduleError, Window
from dash_attn.scheduling import GENERATORS, Problem, Schedule, generate, lower
from dash_attn.scheduling.order import HeadOrder, Order
from dash_attn.scheduling.plan import MOST_RUNS, RUN_FIELDS
from strategies import acyclic_order, examples, problems, seeds

REGULAR: dict[str, Callable[[int], Mask]] = {
    "full": lambda tokens: Full(),
    "causal": lambda tokens: Causal(),
    "window": lambda tokens: Window(4096, 0),
    "window both ways": lambda tokens: Window(1024, 1024),
    "window without a left end": lambda tokens: Window(-1, 200),
    "window without a right end": lambda tokens: Window(100, -1),
    "wide window without a right end": lambda tokens: Window(5000, -1),
    "window of many blocks without a right end": lambda tokens: Window(tokens * 7 // 16, -1),
    "full documents": lambda tokens: Documents((1500, 2596) * (tokens // 4096), causal=False),
    "documents": lambda tokens: Documents((tokens // 3, tokens - tokens // 3 - tokens // 5, tokens // 5)),
    "many documents": lambda tokens: Documents((1500, 2596) * (tokens // 4096)),
    "prefix": lambda tokens: Prefix(tokens // 4),
}


def assert_decodes(schedule: Schedule) -> None:
    plan, problem = lower(schedule), schedule.problem
    for number, kind in enumerate(schedule.order.kinds):
        for kv_tile in range(problem.kv_tiles):
            steps = plan.steps(number, kv_tile)
            assert len(steps) == plan.chain_steps[number * problem.kv_tiles + kv_tile]
            assert steps[:, 0].tolist() == kind.walk(kv_tile).tolist()
            assert steps[:, 1].tolist() == kind.turns(kv_tile).tolist()
            assert steps[:, 2].astype(bool).tolist() == problem.partial[kind.walk(kv_tile), kv_tile].tolist()
    assert plan.turns_per_q_tile.tolist() == problem.kept.sum(1).tolist()
    assert plan.starts.tolist() == [start.tolist() for start in schedule.placement.starts]
    assert (plan.workers, plan.placement.lanes, plan.placement.segments, plan.gang) == (
        schedule.workers,
        schedule.placement.lanes,
        schedule.placement.segments,
        schedule.gang,
    )


@pytest.mark.parametrize("shape", [(16, 8), (8, 8), (10, 8), (24, 8), (64, 8)], ids=str)
@pytest.mark.parametrize(("name", "mask"), SERVED)
def test_decodes_to_the_order(name: str, mask: str, shape: tuple[int, int]) -> None:
    assert_decodes(generate(name, Problem.from_tiles(mask, *shape, heads=2), 8))


@given(problems(), st.sampled_from(sorted(GENERATORS)))
@examples(150)
def test_decodes_to_the_order_on_odd_shapes(problem: Problem, name: str) -> None:
    try:
        schedule = generate(name, problem, 14)
    except ScheduleError:
        return
    assert_decodes(schedule)


@given(problems(), seeds)
@examples(100)
def test_decodes_random_orders(problem: Problem, seed: int) -> None:
    order = Order("random", (acyclic_order(problem, np.random.default_rng(seed)),))
    assert_decodes(Schedule.build(problem, order, (np.arange(problem.kv_tiles),), problem.chains))


def test_irregular_walks_are_listed_entry_by_entry() -> None:
    problem = Problem.from_tiles(np.random.default_rng(0).random((200, 4)) < 0.5, 200, 4)
    plan = lower(generate("ascending", problem, 4))
    assert len(plan.entries) == problem.kept.sum()
    assert plan.runs[:, RUN_FIELDS.index("entries")].min() >= 0
    assert_decodes(generate("ascending", problem, 4))


def test_tables_are_small_integers() -> None:
    plan = lower(generate("auto", Problem.from_tiles("causal", 256, 128), 132))
    for table in (plan.starts, plan.chain_runs, plan.runs, plan.entries, plan.turns_per_q_tile):
        assert table.dtype == np.int32
    assert np.diff(plan.chain_runs).max() <= MOST_RUNS
    assert plan.runs.shape[1] == len(RUN_FIELDS)


@pytest.mark.parametrize("mask", ["full", "causal", "window:16,0", "documents:32,64,32", "prefix:40"])
def test_size_does_not_depend_on_batch_and_heads(mask: str) -> None:
    problem = Problem.from_tiles(mask, 256, 128, heads=2)
    small = lower(generate("auto", problem, 132))
    large = lower(generate("auto", replace(problem, heads=64, batch=16, group=4), 132))
    assert small.tables_bytes == large.tables_bytes > 0


@pytest.mark.parametrize("tiles", [(64, 128), (80, 128), (128, 128)], ids=str)
@pytest.mark.parametrize("mask", REGULAR.values(), ids=REGULAR)
def test_size_is_linear_in_tokens(mask: Callable[[int], Mask], tiles: tuple[int, int]) -> None:
    sizes = [lower(generate("auto", Problem(mask(n), n, n, *tiles), 132)).tables_bytes for n in (32768, 65536)]
    assert sizes[1] / sizes[0] < 2.5  # quadratic would be 4
    assert sizes[1] < 65536 * 6  # bytes per token


def test_hash_names_the_bits() -> None:
    problem = Problem.from_tiles("full", 4, 3, heads=2)
    schedule = generate("ascending", problem, 3)
    kind = schedule.order.kinds[0]
    swap = {0: 1, 1: 0, 2: 2}
    turns = [swap[r] if q == 3 else r for q, r in zip(kind.q_tile.tolist(), kind.turn.tolist(), strict=True)]
    one_swap = Order("ascending", (HeadOrder.build(kind.chain, kind.q_tile, turns, kind.first_step),))
    other_walk = generate("descending", problem, 3)
    swapped = Schedule.build(problem, one_swap, schedule.placement.starts, 3)
    hashes = {lower(s).order_hash for s in (schedule, swapped, other_walk)}
    assert len(hashes) == 3
    renamed = Schedule.build(problem, Order("other name", (kind,)), (np.arange(3)[::-1],), 100)
    assert lower(renamed).order_hash in hashes


def test_hash_sees_tile_sizes_and_the_first_head() -> None:
    problem = Problem(Causal(), 100, 100, 50, 50, heads=2)
    hashes = [
        lower(generate("alternating", p, 4)).order_hash for p in (problem, replace(problem, tile_q=64), replace(problem, head_offset=1))
    ]
    assert len(set(hashes)) == 3
    assert lower(generate("alternating", replace(problem, head_offset=2), 4)).order_hash == hashes[0]


def test_many_runs_say_what_entries_would(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = generate("weave", Problem(Window(100, -1), 16384, 16384, 64, 128), 132)
    runs = lower(schedule)
    monkeypatch.setattr("dash_attn.scheduling.plan.MOST_RUNS", 0)
    entries = lower(schedule)
    assert entries.tables_bytes > 2.5 * runs.tables_bytes
    assert np.diff(entries.chain_runs).max() == 1
    assert runs.order_hash == entries.order_hash
    assert all(np.array_equal(runs.steps(0, kv), entries.steps(0, kv)) for kv in range(schedule.problem.kv_tiles))
