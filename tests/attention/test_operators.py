"""Operators are entered once where they only run, and whoever wants to see them does: modes, fake tensors, autograd, torch.compile."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dash_attn.attention import operators

RUNS: list[int] = []


def _double(x: Tensor, times: int) -> Tensor:
    RUNS.append(times)
    return x * 2 * times


operators.define_operator("doubled_in_a_test(Tensor x, int times) -> Tensor", _double, lambda x, times: x.new_empty(x.shape))
doubled = torch.ops.dash_attn.doubled_in_a_test.default


@pytest.fixture(autouse=True)
def no_runs() -> None:
    RUNS.clear()


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_call_that_only_runs_is_not_dispatched_again(around: Any) -> None:
    with patch.object(type(doubled), "redispatch") as again, around():
        assert torch.equal(doubled(torch.ones(3), 2), torch.full((3,), 4.0))
    assert RUNS == [2]
    assert not again.called


def test_a_mode_sees_the_operator() -> None:
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with torch.no_grad(), Mode():
        doubled(torch.ones(3), 2)
    assert doubled in seen


def test_fake_tensors_run_nothing() -> None:
    with FakeTensorMode() as mode:
        assert doubled(mode.from_tensor(torch.ones(3)), 2).shape == (3,)
    assert not RUNS


def test_without_a_formula_a_gradient_raises() -> None:
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        doubled(torch.ones(3, requires_grad=True), 2).sum().backward()


def test_nobody_compiles_what_an_operator_runs() -> None:
    def program(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return doubled(x, 3) + 1

    assert torch.equal(torch.compile(program, backend="eager")(torch.ones(3)), torch.full((3,), 7.0))
    assert 3 in RUNS
