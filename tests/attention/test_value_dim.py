"""A value head dim other than that of queries and keys, through every door. The output has the values' head dim."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from budget import assert_within_budget
from dash_attn import Causal, Full, Mask, Window, explain, flash_attn_func, flash_attn_varlen_func
from dash_attn.integrations.sdpa import scaled_dot_product_attention
from dense import Results, assert_same_bits, random_inputs, run_dense, run_ours

DIMS = [(24, 40), (40, 24), (192, 128), (16, 1)]  # of queries and keys, of values


def inputs_of(dims: tuple[int, int], q_len: int = 150, kv_len: int = 300, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    q, k, _, _ = random_inputs(q_len, kv_len, (4, 2), dims[0], dtype, batch=2)
    _, _, v, dout = random_inputs(q_len, kv_len, (4, 2), dims[1], dtype, batch=2, seed=1)
    return q, k, v, dout


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", [Full(), Causal(), Window(40, 9)], ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_error_is_at_most_twice_plain_pytorch(dims: tuple[int, int], mask: Mask, dtype: torch.dtype) -> None:
    inputs = inputs_of(dims, dtype=dtype)
    ours = run_ours(inputs, mask)
    assert ours.out.shape == (2, 150, 4, dims[1])
    assert_within_budget(ours, run_dense(inputs, mask, dtype), run_dense(inputs, mask, torch.float64))


def test_softcap_and_gradcheck() -> None:
    q, k, v, _ = (x[:1] for x in inputs_of((3, 5), 7, 9, torch.float64))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    sinks = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *x: flash_attn_func(*x[:3], causal=True, softcap=2.0, sinks=x[3]), [*leaves, sinks])


def test_packed() -> None:
    inputs = inputs_of((24, 40), 150, 150)
    q, k, v, dout = (x.flatten(0, 1) for x in inputs)
    cu = torch.tensor([0, 150, 300], dtype=torch.int32)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = flash_attn_varlen_func(*leaves, cu, cu, 150, 150, causal=True, return_lse=True)
    out, dq, dk, dv = (x.detach().unflatten(0, (2, 150)) for x in (out, *torch.autograd.grad(out, leaves, dout)))
    lse = lse.unflatten(1, (2, 150)).transpose(0, 1)
    assert_same_bits(Results(out, lse, dq, dk, dv), run_ours(inputs, Causal()))


def test_scaled_dot_product_attention() -> None:
    inputs = inputs_of((24, 40), 150, 150)
    q, k, v = (x.transpose(1, 2) for x in inputs[:3])
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.equal(out.transpose(1, 2), run_ours(inputs, Causal()).out)


@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 0), (0, 5)])
def test_nothing_to_attend(q_len: int, kv_len: int) -> None:
    inputs = inputs_of((24, 40), q_len, kv_len)
    ours = run_ours(inputs, Causal())
    assert [r.shape for r in (ours.out, *ours[2:])] == [inputs[3].shape, *(x.shape for x in inputs[:3])]
    assert not any(r.any() for r in (ours.out, *ours[2:]))


def test_explain() -> None:
    q, k, v, _ = inputs_of((24, 40))
    assert explain(flash_attn_func, q, k, v, causal=True) == explain(flash_attn_func, q, k, v[..., :24], causal=True)
