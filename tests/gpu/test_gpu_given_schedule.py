"""A saved schedule on a GPU: the bits of the order that was saved, in every run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from budget import assert_near
from dash_attn import Causal, Full, Mask, ScheduleError, Window, explain, flash_attn_func
from dash_attn.scheduling import Problem, Schedule, generate
from dash_attn.scheduling.order import RUN_TO_RUN, HeadOrder, Order, turn_within
from dense import assert_same_bits, run_ours, same_bits
from gpu_helpers import REPEATS, gpu_inputs, hopper

pytestmark = pytest.mark.gpu

LENGTH = 2000


def problem_of(mask: Mask, dim: int, group: int = 1) -> Problem:
    """One sequence of one KV head: what is saved serves any batch and more heads."""
    tiles = hopper("tiles").backward_tiles(dim)
    return Problem(mask, LENGTH, LENGTH, tiles.q_rows, tiles.kv_rows, group=group)


def shuffled(problem: Problem) -> Schedule:
    """An order of no generator; every chain waits only for earlier starts."""
    start = np.random.default_rng(3).permutation(problem.kv_tiles)
    chain, q_tile = np.nonzero(problem.kept.T)
    kind = HeadOrder.build(chain, q_tile, turn_within(q_tile, np.argsort(start)[chain]), np.zeros(problem.kv_tiles, dtype=np.int64))
    return Schedule.build(problem, Order("shuffled", (kind,)), (start,), 16)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(4, 2), (16, 1)], ids=str)
@pytest.mark.parametrize(
    ("name", "mask"), [("weave", Causal()), ("weave", Window(700, 30)), ("alternating", Causal()), ("shift_blocks", Full())], ids=str
)
def test_a_saved_schedule_has_the_bits_of_its_name(name: str, mask: Mask, heads: tuple[int, int], dim: int) -> None:
    inputs = gpu_inputs(LENGTH, LENGTH, heads, dim, batch=3)
    text = generate(name, problem_of(mask, dim, heads[0] // heads[1]), 132).to_json()  # some orders depend on the group
    expected = run_ours(inputs, mask, schedule=name)
    assert_same_bits(run_ours(inputs, mask, schedule=text), expected, "JSON text")
    assert_same_bits(run_ours(inputs, mask, schedule=Schedule.from_json(text)), expected, "Schedule")


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_given_schedule_may_say_the_parts(dim: int) -> None:
    """Of 4 query heads and 2000 queries the rule makes two parts."""
    inputs = gpu_inputs(LENGTH, LENGTH, (4, 1), dim)
    by_rule = run_ours(inputs, Causal(), schedule="alternating")
    problem = problem_of(Causal(), dim, 4)
    assert problem.parts == 2
    for parts in (1, 2, 3, 4):
        given = generate("alternating", replace(problem, group_parts=parts), 132)
        ours = run_ours(inputs, Causal(), schedule=given)
        assert_near(ours, inputs, Causal())
        assert_same_bits(run_ours(inputs, Causal(), schedule=given), ours, "again")
        assert same_bits(ours.dk, by_rule.dk) == (parts == 2)


@pytest.mark.parametrize("dim", [64, 128])
def test_an_order_of_ones_own(dim: int) -> None:
    inputs = gpu_inputs(LENGTH, LENGTH, (4, 2), dim, batch=3)
    schedule = shuffled(problem_of(Causal(), dim))
    expected = run_ours(inputs, Causal(), schedule=schedule)
    for name in ("auto", "weave", "ascending"):
        assert not same_bits(run_ours(inputs, Causal(), schedule=name).dq, expected.dq), name
    for run in range(max(1, REPEATS // 50)):
        assert_same_bits(run_ours(inputs, Causal(), schedule=schedule), expected, f"run {run}")
    assert explain(flash_attn_func, *inputs[:3], causal=True, schedule=schedule).guarantees == (RUN_TO_RUN,)


def test_what_does_not_fit_is_refused() -> None:
    q, k, v, _ = gpu_inputs(LENGTH, LENGTH)
    with pytest.raises(ScheduleError, match="for mask full; the call has mask causal"):
        flash_attn_func(q, k, v, causal=True, schedule=shuffled(problem_of(Full(), 128)))
