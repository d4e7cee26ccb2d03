"""Schedules that a caller names or gives, on Hopper: what the backward walks, and what is refused before anything is launched."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import pytest
import torch
from torch import Tensor

from dash_attn import Causal
from dash_attn.backends import run
from dash_attn.call.call import Call, Grads, Saved
from dash_attn.call.options import AttentionOptions
from dash_attn.scheduling import Problem, Schedule, generate
from dash_attn.scheduling.order import Order
from launchless import Driver, calls_on_hopper

backward = import_module("dash_attn.backends.hopper.calls.backward")


@pytest.fixture
def driver() -> Iterator[Driver]:
    with calls_on_hopper() as driver:
        yield driver


def made(length: int, heads: int, dim: int, batch: int = 2) -> Tensor:
    return torch.zeros(batch, length, heads, dim, dtype=torch.bfloat16)


def test_a_plan_that_does_not_serve_the_mask_compiles_nothing(driver: Driver) -> None:
    q, lse = made(300, 2, 64), torch.zeros(2, 2, 300)
    with pytest.raises(ValueError, match="shift serves full masks only"):
        backward.backward(Call(q, q, q, AttentionOptions(Causal(), 1.0, schedule="shift")), Saved(q, lse), Grads(q))
    assert not driver.loaded


def saved(name: str, q_rows: int = 128, workers: int = 16) -> Schedule:
    """For one sequence of one head, and tiles of head dim 64 unless told."""
    return generate(name, Problem(Causal(), 300, 300, q_rows, 128), workers)


@pytest.mark.parametrize("name", ["weave", "alternating"])
def test_a_given_schedule_runs_on_the_tables_of_its_name(driver: Driver, name: str) -> None:
    q, k = made(300, 16, 64), made(300, 1, 64)  # a group of two parts
    lse, found = torch.zeros(2, 16, 300), []
    for schedule in (name, saved(name).to_json()):
        backward.backward(Call(q, k, k, AttentionOptions(Causal(), 1.0, schedule=schedule)), Saved(q, lse), Grads(q))
        call = next(reversed(backward._calls._kept.values.values()))
        found.append((call.tables.tables.memory, call.workers, driver.launched[-3:]))
    (named, *rest), (given, *same) = found
    assert torch.equal(named, given)
    assert rest == same


def test_what_the_tables_cannot_hold_is_refused(driver: Driver) -> None:
    q, lse = made(300, 3, 64), torch.zeros(2, 3, 300)
    one = saved("ascending")
    three = Schedule.build(one.problem, Order("three", one.order.kinds * 3), one.placement.starts * 3, 16)
    with pytest.raises(ValueError, match="at most 2 kinds of head; got one of 3"):
        backward.backward(Call(q, q, q, AttentionOptions(Causal(), 1.0, schedule=three.to_json())), Saved(q, lse), Grads(q))
    misfit = AttentionOptions(Causal(), 1.0, schedule=saved("ascending", q_rows=64).to_json())
    with pytest.raises(ValueError, match=r"for tile_q 64; the call has tile_q 128\."):
        backward.backward(Call(q, q, q, misfit), Saved(q, lse), Grads(q))
    assert not driver.launched


def test_the_forward_refuses_a_schedule_that_the_backward_could_not_walk(driver: Driver) -> None:
    q = made(300, 2, 64)
    misfit, fitting = (AttentionOptions(Causal(), 1.0, schedule=saved("weave", rows).to_json()) for rows in (64, 128))
    with pytest.raises(ValueError, match=r"for tile_q 64; the call has tile_q 128\."):
        run.forward(Call(q, q, q, misfit))
    assert not driver.launched
    run.forward(Call(q, q, q, fitting))
    assert [name for name, _ in driver.launched] == ["attention_forward"]
