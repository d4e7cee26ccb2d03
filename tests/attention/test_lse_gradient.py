"""Gradients go through the LSE: a z-loss adds what it should, on both devices, through the operators, with the same bits in every run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from budget import assert_in_budget
from dash_attn import Causal, Documents, Full, Mask, Prefix, TileMap, Window, flash_attn_func, flash_attn_varlen_func
from dash_attn.attention.autograd import attention_backward
from dash_attn.call.call import Call, Grads, Saved
from dash_attn.call.options import AttentionOptions
from dense import Results, dense, random_inputs, same_bits
from devices import disturbed, make_inputs, on_each_device

MASKS: list[tuple[Mask, int, int]] = [
    (Full(), 9, 13),
    (Causal(), 12, 12),
    (Causal(), 15, 6),  # the first queries attend to nothing: their LSE is -inf, and so constant
    (Window(3, 1), 10, 14),
    (Documents((5, 1, 6)), 12, 12),
    (Prefix(4), 11, 11),
    (TileMap(np.array([[True, False], [False, False], [True, True]]), 4, 7), 12, 14),
]


def z_loss(lse: Tensor) -> Tensor:
    """Rows that attend to nothing have no part in it."""
    return torch.where(lse == -torch.inf, 0.0, lse).square().sum()


@pytest.mark.parametrize(("mask", "q_len", "kv_len"), MASKS, ids=lambda x: str(x))
@pytest.mark.parametrize("sinks", [False, True])
def test_gradcheck(mask: Mask, q_len: int, kv_len: int, sinks: bool) -> None:
    q, k, v, _ = random_inputs(q_len, kv_len, (4, 2), 6, torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if sinks:
        leaves.append(torch.linspace(-1, 1, 4, dtype=torch.float64, requires_grad=True))

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        out, lse = flash_attn_func(q, k, v, mask=mask, sinks=sinks, softcap=3.0, return_lse=True)
        return out, torch.where(lse == -torch.inf, 0.0, lse)

    assert torch.autograd.gradcheck(attend, leaves, fast_mode=True)
    assert torch.autograd.gradcheck(lambda *x: attend(*x)[1], leaves, fast_mode=True)  # the output is not used


def test_gradcheck_of_packed_sequences() -> None:
    """One sequence has no keys: its LSE is the sink."""
    q, k, v, _ = (x[0] for x in random_inputs(14, 14, (4, 2), 6, torch.float64))
    ends_q, ends_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 9, 14], [0, 8, 8, 14]))
    sinks = torch.linspace(-1, 1, 4, dtype=torch.float64, requires_grad=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Any:
        return flash_attn_varlen_func(q, k, v, ends_q, ends_k, 5, 8, sinks=sinks, return_lse=True)

    assert torch.autograd.gradcheck(attend, [x.requires_grad_() for x in (q, k, v, sinks)], fast_mode=True)


def test_without_any_key_the_sinks_have_the_whole_gradient() -> None:
    q, k, v, _ = random_inputs(7, 5, (4, 2), 8, torch.float64, batch=2)
    sinks = torch.tensor([0.5, -1.0, 2.0, -torch.inf], dtype=torch.float64, requires_grad=True)
    _, lse = flash_attn_func(q.requires_grad_(), k[:, :0], v[:, :0], sinks=sinks, return_lse=True)
    lse[:, :3].square().sum().backward()
    assert torch.allclose(sinks.grad[:3], 2 * 2 * 7 * sinks.detach()[:3])
    assert sinks.grad[3] == 0
    assert not q.grad.any()


@on_each_device
@pytest.mark.parametrize("mask", [Full(), Causal(), Window(100, 0), Documents((300, 20, 320)), Prefix(150)], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 192])
def test_a_z_loss_is_within_the_budget(device: str, mask: Mask, dim: int) -> None:
    if device == "cpu" and dim != 64:
        pytest.skip("head dims are one path there")
    inputs = make_inputs(device, (640, 640), (4, 2), (dim, 0), torch.bfloat16, batch=2)
    ours = _with_z_loss(inputs, lambda q, k, v: flash_attn_func(q, k, v, mask=mask, return_lse=True))
    with inputs[0].device:
        truth, plain = (
            _with_z_loss(tuple(x.to(dtype) for x in inputs), lambda q, k, v: dense(q, k, v, mask))
            for dtype in (torch.float64, torch.bfloat16)
        )
    assert_in_budget(ours, plain, truth)
    without = torch.autograd.grad(*_loss(inputs, lambda q, k, v: (flash_attn_func(q, k, v, mask=mask), None)))
    assert not torch.equal(ours.dq, without[0])  # the control: it is not nothing


@on_each_device
def test_packed_sequences_have_the_gradients_of_each_alone(device: str) -> None:
    lengths = [200, 1, 439]
    q, k, v, dout = (x[0] for x in make_inputs(device, (640, 640), (4, 2), (64, 0)))
    ends = torch.tensor([0, 200, 201, 640], dtype=torch.int32, device=device)
    packed = _with_z_loss(
        (q, k, v, dout), lambda q, k, v: flash_attn_varlen_func(q, k, v, ends, ends, 439, 439, causal=True, return_lse=True)
    )
    parts = zip(*(x.split(lengths) for x in (q, k, v, dout)), strict=True)
    for part, dq, dk, dv in zip(parts, *(x.split(lengths) for x in packed[2:]), strict=True):
        alone = _with_z_loss(tuple(x[None] for x in part), lambda q, k, v: flash_attn_func(q, k, v, causal=True, return_lse=True))
        assert all(same_bits(one, other[0]) for one, other in zip((dq, dk, dv), alone[2:], strict=True))


@on_each_device
def test_the_same_bits_in_every_run_and_through_the_operator(device: str) -> None:
    inputs = make_inputs(device, (640, 640), (4, 2), (64, 0), batch=2)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attn_func(q, k, v, causal=True, return_lse=True)

    first = _with_z_loss(inputs, attend)
    for run in range(4):
        with disturbed(device, run):
            again = _with_z_loss(inputs, attend)
        assert all(same_bits(a, b) for a, b in zip(first, again, strict=True))
    torch._dynamo.reset()
    compiled = _with_z_loss(inputs, torch.compile(attend, backend="aot_eager", fullgraph=True))
    assert all(same_bits(a, b) for a, b in zip(first, compiled, strict=True))


@on_each_device
def test_rows_that_attend_nothing_ignore_the_gradient_of_their_lse(device: str) -> None:
    """It is that of a constant, -inf, and often NaN or infinite itself."""
    q, k, v, dout = make_inputs(device, (300, 100), (4, 2), (64, 0))
    options = AttentionOptions(Causal(), 0.125)
    out, lse = flash_attn_func(q, k, v, causal=True, softmax_scale=0.125, return_lse=True)
    nothing = lse == -torch.inf
    assert nothing.any()
    assert not nothing.all()
    dlse = torch.ones_like(lse)
    clean = attention_backward(Call(q, k, v, options), Saved(out, lse), Grads(dout, dlse))
    dirty = attention_backward(Call(q, k, v, options), Saved(out, lse), Grads(dout, dlse.masked_fill(nothing, torch.nan)))
    assert all(same_bits(a, b) for a, b in zip(clean[:3], dirty[:3], strict=True))


@on_each_device
def test_sinks_get_their_part(device: str) -> None:
    q, k, v, _ = make_inputs(device, (300, 100), (4, 2), (64, 0))  # the first 200 queries attend to nothing but the sink
    sinks = torch.linspace(-1, 2, 4, device=device)

    def gradient(dtype: torch.dtype, attend: Any) -> Tensor:
        leaf = sinks.detach().to(dtype, copy=True).requires_grad_()
        z_loss(attend(*(x.to(dtype) if dtype == torch.float64 else x for x in (q, k, v)), leaf)).backward()
        return leaf.grad.double()

    def plain(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        with q.device:
            _, lse = dense(q, k, v, Causal())
        return torch.logaddexp(lse, sinks[:, None])

    ours = gradient(torch.float32, lambda q, k, v, s: flash_attn_func(q, k, v, causal=True, sinks=s, return_lse=True)[1])
    truth = gradient(torch.float64, plain)
    assert torch.allclose(ours, truth, rtol=1e-3)


@on_each_device
def test_gradients_of_any_layout(device: str) -> None:
    """Autograd hands on whatever a loss made: expanded, transposed, only of some rows."""
    q, k, v, dout = make_inputs(device, (200, 200), (4, 2), (64, 0), batch=2)
    for loss in (lambda lse: lse.sum(), lambda lse: lse.transpose(1, 2).square().sum(), lambda lse: lse[:, 1, 50:].sum()):
        leaf = q.detach().requires_grad_()
        out, lse = flash_attn_func(leaf, k, v, causal=True, return_lse=True)
        given = lse.detach().requires_grad_()
        (dlse,) = torch.autograd.grad(loss(given), given)
        options = AttentionOptions(Causal(), 64**-0.5)
        expected, *_ = attention_backward(Call(q, k, v, options), Saved(out.detach(), lse.detach()), Grads(dout, dlse.contiguous()))
        (found,) = torch.autograd.grad((out, loss(lse)), leaf, (dout, torch.ones((), device=device)))
        assert same_bits(found, expected)


def _loss(inputs: Any, attend: Any) -> tuple[Any, list[Tensor], Any]:
    """(outputs, leaves, gradients of the outputs) for torch.autograd.grad."""
    *tensors, dout = inputs
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse = attend(*leaves)
    if lse is None:
        return out, leaves, dout
    return (out, z_loss(lse)), leaves, (dout, torch.ones((), dtype=lse.dtype, device=lse.device))


def _with_z_loss(inputs: Any, attend: Any) -> Results:
    *tensors, dout = inputs
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse = attend(*leaves)
    one = torch.ones((), dtype=lse.dtype, device=lse.device)
    return Results(out.detach(), lse.detach(), *torch.autograd.grad((out, z_loss(lse)), leaves, (dout, one)))
