"""The error budget of every accuracy test: twice what plain PyTorch errs in the same dtype, and a little slack."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dash_attn import Mask
from dense import Results, WithSinks, largest_error, run_dense, run_ours
from devices import Case, require

FLOOR = 1e-4  # of the largest value: far below one rounding to 16 bits


class Slack(NamedTuple):
    """What comes on top of twice plain PyTorch's error: a part of the largest value."""

    relative: float
    lse: float | None = None  # all that the LSE may be off, whatever plain PyTorch does


SIXTEEN_BITS = Slack(FLOOR, lse=1e-3)  # of either device. Plain PyTorch rounds the LSE to 16 bits, ours has 32


def few_roundings(dtype: torch.dtype) -> Slack:
    """Of the CPU backend's arithmetic."""
    return Slack(16 * torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps)


def assert_case(device: str, case: Case, **options: Any) -> Results:
    """Ours against the budget; returns ours."""
    require(device, *case.features)
    q, k, v, dout = case.inputs(device)
    if case.softcap:
        q = q * 6  # so that some scores reach the cap
        options["softcap"] = case.softcap
    inputs = (q, k, v, dout)
    ours = run_ours(inputs, case.mask, **options)
    assert_near(ours, inputs, case.mask, softcap=case.softcap)
    return ours


def assert_near(ours: Results, inputs: tuple[Tensor, ...], mask: Mask | Tensor, scale: float | None = None, softcap: float = 0.0) -> None:
    """Ours against dense attention in fp64, with the budget of dense attention in the dtype of the inputs."""
    with inputs[0].device:  # the dense mask is made where the tensors are
        truth = run_dense(inputs, mask, torch.float64, scale, softcap)
        plain = run_dense(inputs, mask, inputs[0].dtype, scale, softcap)
    assert_in_budget(ours, plain, truth)


def assert_within_budget(ours: Results | WithSinks, plain: Results | WithSinks, truth: Results | WithSinks) -> None:
    """On the CPU, where no more than a few roundings of the arithmetic are allowed on top."""
    assert_in_budget(ours, plain, truth, few_roundings(ours.out.dtype))


def assert_in_budget(
    ours: Results | WithSinks, plain: Results | WithSinks, truth: Results | WithSinks, slack: Slack = SIXTEEN_BITS
) -> None:
    """Gradients share one slack: where a softmax is flat, dQ and dK are small differences of large terms."""
    of_gradients = _size(*truth[2:])
    for name, mine, theirs, exact in zip(truth._fields, ours, plain, truth, strict=True):
        assert mine.shape == exact.shape, f"{name} has shape {tuple(mine.shape)}, expected {tuple(exact.shape)}"
        budget = 2 * largest_error(theirs, exact) + slack.relative * (of_gradients if name.startswith("d") else _size(exact))
        if name == "lse" and slack.lse is not None:
            budget = slack.lse
        error = largest_error(mine, exact)
        assert error <= budget, f"{name} is off by {error:.3g}; the budget is {budget:.3g}"


def _size(*tensors: Tensor) -> float:
    """The largest finite value, but at least 1."""
    return max([1.0, *(t.nan_to_num(0.0, 0.0, 0.0).abs().max().item() for t in tensors if t.numel())])
