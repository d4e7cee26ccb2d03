"""Attention sinks over the grid: one logit per query head that takes weight and gives no value. Both devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from budget import assert_in_budget
from dash_attn import Causal, Documents, Mask, Prefix, flash_attn_varlen_func
from dense import Results, WithSinks, dense, largest_error, run_dense_with_sinks, run_ours_with_sinks, same_bits
from devices import Case, on_devices, on_each_device, require
from gpu_helpers import ragged_map
from grid import DTYPES, HEADS, MASKS, batch_of, some_for_the_cpu
from packed_batches import make_parts, pack, places


def cases() -> list[Case]:
    """Lengths with masks; heads, head dims and dtypes take turns where that shares kernels."""
    kernels = ((64, DTYPES[0]), (128, DTYPES[0]), (128, DTYPES[1]))
    lengths = ((1, 1), (1, 239), (113, 203), (384, 256), (640, 128), (1024, 1023))
    chosen = []
    for i, pair in enumerate(lengths):
        for j, make_mask in enumerate(MASKS.values()):
            dim, dtype = kernels[(i + j) % 3]
            chosen.append(Case(pair, make_mask(pair), HEADS[(i + 2 * j) % 3], dim, dtype=dtype, batch=batch_of(pair)))
    others: tuple[Mask, ...] = (Documents((50, 200, 1, 133)), Prefix(70), ragged_map(384, 384))
    return chosen + [Case((384, 384), mask) for mask in others]


def logits(device: str, heads: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """From almost nothing to more than all the keys together."""
    return torch.linspace(-3, 8, heads, device=device).to(dtype)


def attend(inputs: tuple[Tensor, ...], sinks: Tensor, mask: Mask) -> WithSinks:
    return run_ours_with_sinks(inputs, sinks, mask=mask)


def assert_right(ours: WithSinks, inputs: tuple[Tensor, ...], sinks: Tensor, mask: Mask) -> None:
    plain, truth = (run_dense_with_sinks(inputs, sinks, mask, dtype) for dtype in (inputs[0].dtype, torch.float64))
    assert_in_budget(*(Results(*results[:5]) for results in (ours, plain, truth)))
    error, allowed = largest_error(ours.dsinks, truth.dsinks), 2 * largest_error(plain.dsinks, truth.dsinks)
    assert error <= allowed + rounding_of_dsinks(inputs, sinks, truth), f"dsinks is off by {error:.3g}; plain PyTorch allows {allowed:.3g}"


def rounding_of_dsinks(inputs: tuple[Tensor, ...], sinks: Tensor, truth: WithSinks) -> float:
    """What 16-bit outputs cost, three standard deviations: there are too few sinks for plain PyTorch's largest error to tell.

    The gradient of a sink is minus the sum over rows of its weight times (dO . O), and O has been rounded.
    """
    eps = torch.finfo(inputs[0].dtype).eps
    weights = torch.exp(sinks.double().view(1, -1, 1) - truth.lse)
    squares = (inputs[3].double() * truth.out).square().sum(-1).transpose(1, 2)
    noise = (weights.square() * squares).sum((0, 2)).sqrt() + truth.dsinks.abs() / 2
    return eps * noise.max().item()


@pytest.mark.parametrize(("device", "case"), on_devices(some_for_the_cpu(cases(), 2), cases()))
def test_error_budget(device: str, case: Case) -> None:
    require(device, "sinks", *case.features)
    inputs, sinks = case.inputs(device), logits(device, case.heads[0], case.dtype)
    assert_right(attend(inputs, sinks, case.mask), inputs, sinks, case.mask)
    assert_right(attend(inputs, sinks.float(), case.mask), inputs, sinks, case.mask)


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_the_budget_sees_a_wrong_sink(factor: float) -> None:
    """The control."""
    inputs, sinks = Case((113, 203), heads=(6, 2), dim=64).inputs("cpu"), logits("cpu", 6)
    with pytest.raises(AssertionError, match="the budget is"):
        assert_right(attend(inputs, sinks * factor, Causal()), inputs, sinks, Causal())


@pytest.mark.parametrize("factor", [0.97, 1.03])
def test_the_budget_sees_a_wrong_gradient(factor: float) -> None:
    """Another control: here the gradient is large, as all rows push the same way."""
    q, k, v, _ = Case((113, 203), heads=(6, 2), dim=64).inputs("cpu")
    sinks = logits("cpu", 6)
    inputs = (q, k, v, attend((q, k, v, q), sinks, Causal()).out)
    ours = attend(inputs, sinks, Causal())
    assert_right(ours, inputs, sinks, Causal())
    with pytest.raises(AssertionError, match="dsinks is off by"):
        assert_right(ours._replace(dsinks=ours.dsinks * factor), inputs, sinks, Causal())


def test_the_reference_without_weight_on_the_sink_is_dense_attention() -> None:
    inputs = replace(Case((60, 90), Causal()), dtype=torch.float64).inputs("cpu")
    out, lse = dense(*inputs[:3], Causal())
    nothing = run_dense_with_sinks(inputs, torch.full((4,), -1e9), Causal(), torch.float64)
    torch.testing.assert_close(nothing.out, out)
    torch.testing.assert_close(nothing.lse, lse)


@on_each_device
def test_rows_that_attend_nothing_have_the_sink_as_lse(device: str) -> None:
    require(device, "sinks")
    sinks = logits(device, 4)
    ours = attend(Case((300, 100)).inputs(device), sinks, Causal())
    assert not any(x[:, :200].any() for x in (ours.out, ours.dq))
    torch.testing.assert_close(ours.lse[:, :, :200], sinks.view(1, -1, 1).expand(2, -1, 200), rtol=1e-6, atol=1e-6)
    assert ours.out[:, 200:].any(), "the control"


@on_each_device
def test_a_sequence_has_its_bits_in_any_batch(device: str) -> None:
    require(device, "sinks")
    inputs, sinks = Case((300, 300), batch=4).inputs(device), logits(device, 4)
    together = attend(inputs, sinks, Causal())
    for i in range(4):
        alone = attend(tuple(x[i : i + 1] for x in inputs), sinks, Causal())
        for name in ("out", "lse", "dq", "dk", "dv"):
            assert same_bits(getattr(alone, name), getattr(together, name)[i : i + 1]), f"{name} of sequence {i}"


@on_each_device
def test_packed_sequences_have_the_bits_they_have_alone(device: str) -> None:
    require(device, "sinks", "varlen")
    lengths, sinks = (300, 1, 129), logits(device, 4)
    parts = make_parts(device, tuple((n, n) for n in lengths))
    leaves = [x.requires_grad_() for x in (*pack(parts)[:3], sinks.clone())]
    ends = places(list(lengths), device)
    out, lse = flash_attn_varlen_func(*leaves[:3], ends, ends, 300, 300, causal=True, sinks=leaves[3], return_lse=True)
    gradients = torch.autograd.grad(out, leaves[:3], pack(parts)[3])
    tokens = [x.detach().split(lengths) for x in (out, *gradients)]
    for i, part in enumerate(parts):
        alone = attend(part, sinks, Causal())
        packed = [tokens[0][i][None], lse.split(lengths, 1)[i][None], *(gradient[i][None] for gradient in tokens[1:])]
        for name, one in zip(("out", "lse", "dq", "dk", "dv"), packed, strict=True):
            assert same_bits(one, getattr(alone, name)), f"{name} of sequence {i}"
