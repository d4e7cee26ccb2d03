"""On fewer workers than wait for each other, chains rest in memory between the legs of their walks: the bits stay the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dash_attn import Causal, Documents, Full, Mask, TileMap, Window, explain, flash_attn_func
from dash_attn.backends.cpu.ranks import RankBackward
from dash_attn.backends.cpu.recorder import record_backward
from dash_attn.call.call import Call, Grads, Saved
from dash_attn.call.options import AttentionOptions
from dash_attn.call.planning import plan_on_any
from dash_attn.errors import ExecutionError
from dash_attn.execution.interleaving import TaskTime, interleaving
from dash_attn.scheduling import Problem, Schedule, generate
from dash_attn.scheduling.order import ALL_GUARANTEES, RUN_TO_RUN, HeadOrder, Order, turn_within
from dash_attn.scheduling.ranks.units import Unit
from dash_attn.scheduling.validate import TooFewWorkers
from dense import Results, assert_same_bits, random_inputs, repeated, run_dense, run_ours, same_bits
from inputs import Inputs

WORKERS = (1, 2, 7, 16, 33, 132)

# queries, keys, (query heads, KV heads), batch; on full masks
SHAPES: dict[str, tuple[int, int, tuple[int, int], int]] = {
    "ragged": (1090, 1090, (2, 2), 1),
    "two circles": (2190, 2190, (1, 1), 1),
    "queries shorter": (1290, 2450, (2, 1), 1),  # one part of two
    "keys shorter": (2500, 1101, (2, 1), 1),  # two parts of one
    "parts of 1 and 2": (1400, 1300, (3, 1), 1),
}


def problem_of(shape: tuple[int, int, tuple[int, int], int], mask: Mask | None = None) -> Problem:
    q_len, kv_len, (q_heads, kv_heads), batch = shape
    return Problem(mask or Full(), q_len, kv_len, heads=kv_heads, group=q_heads // kv_heads, batch=batch)


def made(shape: tuple[int, int, tuple[int, int], int]) -> Inputs:
    q_len, kv_len, heads, batch = shape
    return random_inputs(q_len, kv_len, heads, 8, batch=batch)


def check_on_all(inputs: Inputs, mask: Mask, expected: Results, threads: bool, workers: tuple[int, ...] = WORKERS, **options: Any) -> None:
    run = repeated(inputs, mask, **options)
    for count in workers:
        seed = None if count in (2, 132) else count  # None: the oldest chain that can moves next; threads do not sleep
        with interleaving(seed, threads, workers=count):
            assert_same_bits(run(), expected, f"{count} workers, seed {seed}")


@pytest.mark.parametrize("threads", [pytest.param(False, id="coroutines", marks=pytest.mark.exhaustive), pytest.param(True, id="threads")])
@pytest.mark.parametrize("name", SHAPES)
def test_full_masks(name: str, threads: bool) -> None:
    inputs, problem = made(SHAPES[name]), problem_of(SHAPES[name])
    assert plan_on_any(problem, "auto", 7).legs is not None
    assert plan_on_any(problem, "auto", 132).legs is None
    expected = run_ours(inputs, Full())
    check_on_all(inputs, Full(), expected, threads, (2, 7, 33) if threads else WORKERS)


def test_the_shapes_have_parts_and_members() -> None:
    found = {name: (problem_of(shape).parts, problem_of(shape).most_members) for name, shape in SHAPES.items()}
    assert [found[name] for name in ("queries shorter", "keys shorter", "parts of 1 and 2")] == [(1, 2), (2, 1), (2, 2)]


@pytest.mark.parametrize(("name", "mask"), [("symmetric_shift", Causal()), ("arrival", Window(300, 40)), ("arrival", Full())], ids=str)
def test_other_schedules_with_gangs(name: str, mask: Mask) -> None:
    shape = (2176, 2176, (1, 1), 1)
    inputs, problem = made(shape), problem_of(shape, mask)
    assert generate(name, problem, 132).gang > 7
    expected = run_ours(inputs, mask, schedule=name)
    check_on_all(inputs, mask, expected, False, (1, 2, 7), schedule=name)
    check_on_all(inputs, mask, expected, True, (2,), schedule=name)


def drawn(problem: Problem) -> Schedule:
    """Walks and ranks follow one sequence of all tasks, drawn at random."""
    kv_tile, q_tile = np.nonzero(problem.kept.T)
    turn = np.random.default_rng(0).permutation(len(q_tile))
    by_walk = np.lexsort((turn, kv_tile))
    kv_tile, q_tile, turn = kv_tile[by_walk], q_tile[by_walk], turn[by_walk]
    kind = HeadOrder.build(kv_tile, q_tile, turn_within(q_tile, turn), np.zeros(problem.kv_tiles, dtype=np.int64))
    return Schedule.build(problem, Order("drawn", (kind,)), (np.arange(problem.kv_tiles),), 132)


def test_schedules_of_ones_own() -> None:
    """An order that was given is the one that runs, on any number of workers: also that of `shift`, which was made for many."""
    shape = (1000, 900, (2, 1), 2)
    inputs, problem = made(shape), problem_of(shape)
    for schedule in (drawn(problem), generate("shift", problem, 132)):
        assert schedule.gang > 7
        expected = run_ours(inputs, Full(), schedule=schedule)
        assert not same_bits(run_ours(inputs, Full(), schedule="alternating").dq, expected.dq), "the control"
        check_on_all(inputs, Full(), expected, False, (1, 7), schedule=schedule)
    q, k, v, _ = inputs
    told = explain(flash_attn_func, q, k, v, schedule=drawn(problem))
    assert (told.guarantees, told.gang) == ((RUN_TO_RUN,), 1)


def test_controls_differ() -> None:
    inputs = made(SHAPES["ragged"])
    expected = run_ours(inputs, Full())
    with interleaving(0, workers=2):
        unordered = run_ours(inputs, Full(), accumulation="unordered")
        other = run_ours(inputs, Full(), schedule="alternating")
    assert not same_bits(unordered.dq, expected.dq)
    assert not same_bits(other.dq, expected.dq)


def test_a_state_that_is_rounded_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = made(SHAPES["ragged"])
    expected, run = run_ours(inputs, Full()), RankBackward.run

    def rounded(self: RankBackward, unit: Unit, state: Tensor) -> None:
        run(self, unit, state)
        state.copy_(state.bfloat16())

    monkeypatch.setattr(RankBackward, "run", rounded)
    with interleaving(None, workers=2):
        found = run_ours(inputs, Full())
    assert same_bits(found.dq, expected.dq)
    assert not same_bits(found.dk, expected.dk)
    assert not same_bits(found.dv, expected.dv)


def test_a_unit_that_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, run = made(SHAPES["ragged"]), RankBackward.run
    last = len(plan_on_any(problem_of(SHAPES["ragged"]), "auto", 2).legs.units) - 1  # type: ignore[union-attr]
    monkeypatch.setattr(RankBackward, "run", lambda self, unit, state: None if unit.number == last else run(self, unit, state))
    with interleaving(None, workers=2), pytest.raises(ExecutionError, match=r"has \d+ chains, but \d+ landed"):
        run_ours(inputs, Full())


def test_sinks_softcap_the_gradient_of_the_lse_and_other_dtypes() -> None:
    q, k, v, dout = random_inputs(1090, 1090, (2, 1), 8, torch.bfloat16)
    sinks = torch.tensor([0.5, -1.0])

    def run() -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v[..., :5], sinks)]
        out, lse = flash_attn_func(*leaves[:3], softcap=3.0, sinks=leaves[3], return_lse=True)
        return torch.autograd.grad((out * dout[..., :5]).sum() + lse.square().sum(), leaves)

    expected = run()
    for workers in (1, 7):
        with interleaving(workers, workers=workers):
            assert all(map(same_bits, run(), expected))


def test_documents_one_by_one() -> None:
    """Each has an order of its own, and some have circles."""
    inputs, mask = random_inputs(1700, 1700, (1, 1), 8), Documents((1200, 500), causal=False)
    check_on_all(inputs, mask, run_ours(inputs, mask), False, (1, 7))


def test_it_is_attention() -> None:
    inputs = random_inputs(1090, 1090, (1, 1), 8, torch.float64)
    with interleaving(1, workers=3):
        found = run_ours(inputs, Full())
    for ours, true in zip(found, run_dense(inputs, Full(), torch.float64), strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-11, atol=1e-11)


def test_explain_promises_any_number_of_workers() -> None:
    q, _, _, _ = random_inputs(2176, 2176, (1, 1), 64)
    told = explain(flash_attn_func, q, q, q)
    assert (told.schedule, told.guarantees, told.gang) == ("shift_blocks", ALL_GUARANTEES, 1)
    assert "resident together" not in str(told)
    on_gpu = torch.empty_like(q, device="meta", dtype=torch.bfloat16)
    hopper = explain(flash_attn_func, on_gpu, on_gpu, on_gpu, backend="hopper")
    assert (hopper.guarantees, hopper.gang) == (ALL_GUARANTEES, 9)
    blocks = explain(
        flash_attn_func,
        on_gpu,
        on_gpu,
        on_gpu,
        mask=TileMap(np.ones((17, 17), dtype=bool), 128, 128),
        schedule="shift_blocks",
        backend="hopper",
    )
    assert blocks.guarantees[2] == "worker-count-invariant (9 workers or more)"


def test_a_gang_beyond_the_default_number_of_workers() -> None:
    """136 chains wait for each other, more than an H200 has SMs."""
    q = torch.zeros(1, 34816, 1, 8)
    told = explain(flash_attn_func, q, q, q, causal=True, schedule="symmetric_shift")
    assert (told.guarantees, told.gang, told.workers) == (ALL_GUARANTEES, 1, 132)


def test_times_are_noted_in_legs_but_a_chart_needs_whole_chains() -> None:
    shape = SHAPES["ragged"]
    q, k, v, dout = made(shape)
    record: list[TaskTime] = []
    with interleaving(None, threads=True, workers=2, record=record):
        run_ours((q, k, v, dout), Full())
    assert len({row.task for row in record}) == len(record) == problem_of(shape).tasks
    assert {row.worker for row in record} <= {0, 1}
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    with pytest.raises(TooFewWorkers, match=r"needs 9 workers at once .* there are 2\."):
        record_backward(Call(q, k, v, AttentionOptions(Full(), 0.5)), Saved(out, lse), Grads(dout), workers=2)


def test_an_order_that_depends_on_the_workers_is_never_run_in_legs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator that refuses few workers, and would have another order on more."""
    from dash_attn.scheduling.generators import GENERATORS

    shift_blocks = GENERATORS["shift_blocks"]

    def dependent(problem: Problem, workers: int) -> Schedule:
        made = shift_blocks(problem, workers)
        return replace(made, order=replace(made.order, guarantees=ALL_GUARANTEES[:2]))

    monkeypatch.setitem(GENERATORS, "shift_blocks", dependent)
    with pytest.raises(TooFewWorkers, match="there are 3"):
        plan_on_any(Problem(Full(), 1091, 1091), "shift_blocks", 3)
