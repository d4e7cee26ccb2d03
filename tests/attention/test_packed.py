"""Packed QKV and KV: the same bits as the separate tensors, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from budget import assert_within_budget
from dash_attn import Causal, Mask, Window, flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from dense import Results, assert_same_bits, random_inputs, run_dense, run_ours


def run_qkvpacked(inputs: tuple[torch.Tensor, ...], **options: Any) -> Results:
    q, k, v, dout = inputs
    qkv = torch.stack((q, k, v), 2).requires_grad_()
    out, lse = flash_attn_qkvpacked_func(qkv, return_lse=True, **options)
    (gradient,) = torch.autograd.grad(out, qkv, dout)
    return Results(out.detach(), lse, *gradient.unbind(2))


def run_kvpacked(inputs: tuple[torch.Tensor, ...], **options: Any) -> Results:
    q, k, v, dout = inputs
    leaves = q.clone().requires_grad_(), torch.stack((k, v), 2).requires_grad_()
    out, lse = flash_attn_kvpacked_func(*leaves, return_lse=True, **options)
    dq, dkv = torch.autograd.grad(out, leaves, dout)
    return Results(out.detach(), lse, dq, *dkv.unbind(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", [Causal(), Window(40, 20)], ids=str)
def test_qkvpacked_is_flash_attn_func(mask: Mask, dtype: torch.dtype) -> None:
    inputs = random_inputs(300, 300, (2, 2), 16, dtype, batch=2)
    ours = run_qkvpacked(inputs, mask=mask)
    assert_same_bits(ours, run_ours(inputs, mask))
    assert_within_budget(ours, run_dense(inputs, mask, dtype), run_dense(inputs, mask, torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", [Causal(), Window(40, 20)], ids=str)
def test_kvpacked_is_flash_attn_func(mask: Mask, dtype: torch.dtype) -> None:
    inputs = random_inputs(150, 300, (4, 2), 16, dtype, batch=2)
    ours = run_kvpacked(inputs, mask=mask)
    assert_same_bits(ours, run_ours(inputs, mask))
    assert_within_budget(ours, run_dense(inputs, mask, dtype), run_dense(inputs, mask, torch.float64))


def test_our_options_arrive() -> None:
    """Another schedule is another order of the sum, so its bits tell whether the option was passed on."""
    inputs = random_inputs(700, 700, (2, 2), 16)
    default, other = run_ours(inputs, Causal()), run_ours(inputs, Causal(), schedule="ascending")
    assert not torch.equal(default.dq, other.dq)
    assert_same_bits(run_qkvpacked(inputs, causal=True, schedule="ascending"), other)
    assert_same_bits(run_kvpacked(inputs, causal=True, schedule="ascending"), other)


def test_positional_order_is_flash_attentions() -> None:
    q, k, v, _ = random_inputs(100, 100)
    arguments = (0.0, 0.3, True, (40, 40), 5.0, None, True, True)
    expected = flash_attn_func(q, k, v, *arguments)
    for packed in (
        flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), *arguments),
        flash_attn_kvpacked_func(q, torch.stack((k, v), 2), *arguments),
    ):
        assert torch.equal(packed[0], expected[0])
        assert torch.equal(packed[1], expected[1])
        assert packed[2] is None


@pytest.mark.parametrize("shape", [(2, 10, 2, 4, 16), (2, 10, 3, 4), (2, 10, 4, 3, 16)])
def test_qkv_of_another_layout(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"qkv must be 5-d \(batch, length, 3, heads, head dim\); got shape"):
        flash_attn_qkvpacked_func(torch.zeros(shape))


@pytest.mark.parametrize("shape", [(2, 10, 3, 4, 16), (2, 10, 2, 4)])
def test_kv_of_another_layout(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"kv must be 5-d \(batch, length, 2, heads, head dim\); got shape"):
        flash_attn_kvpacked_func(torch.zeros(2, 10, 4, 16), torch.zeros(shape))


def test_not_a_tensor() -> None:
    with pytest.raises(TypeError, match="qkv must be a tensor; got list"):
        flash_attn_qkvpacked_func([1.0])


def test_what_flash_attn_func_refuses_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dropout_p must be 0, .*got 1.0"):
        flash_attn_qkvpacked_func(torch.zeros(1, 4, 3, 1, 8), 1.0)
    with pytest.raises(ValueError, match="q and k must have the same head dim"):
        flash_attn_kvpacked_func(torch.zeros(1, 4, 1, 16), torch.zeros(1, 4, 2, 1, 8))
    with pytest.raises(TypeError, match="unexpected keyword"):
        flash_attn_kvpacked_func(torch.zeros(1, 4, 1, 8), torch.zeros(1, 4, 2, 1, 8), shedule="auto")
