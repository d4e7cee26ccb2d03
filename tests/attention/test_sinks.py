"""Attention sinks: one logit per query head that takes weight and gives no value, its gradient, and its bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from budget import assert_within_budget
from dash_attn import Causal, Documents, Full, Mask, Prefix, TileMap, Window, explain, flash_attn_func, flash_attn_varlen_func
from dash_attn.execution.interleaving import interleaving
from dense import WithSinks, random_inputs, run_dense_with_sinks, same_bits
from dense import run_ours_with_sinks as run_ours

CASES: list[tuple[Mask, int, int]] = [
    (Full(), 200, 200),
    (Causal(), 257, 257),
    (Causal(), 300, 100),  # the first 200 queries attend to nothing but the sink
    (Window(30, 5), 150, 290),
    (Documents((5, 100, 1, 130)), 236, 236),
    (Prefix(70), 190, 190),
    (TileMap(np.array([[True, False], [False, False], [True, True]]), 50, 70), 150, 140),
]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


def logits(heads: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.linspace(-1.5, 3.0, heads, dtype=torch.float64).to(dtype)


def assert_same_bits(actual: WithSinks, expected: WithSinks, what: str = "") -> None:
    for name, a, b in zip(NAMES, actual, expected, strict=True):
        assert same_bits(a, b), f"{what} {name} differs"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("mask", "q_len", "kv_len"), CASES, ids=[f"{m}-{q}x{k}" for m, q, k in CASES])
def test_error_is_at_most_twice_plain_pytorch(mask: Mask, q_len: int, kv_len: int, dtype: torch.dtype) -> None:
    inputs, sinks = random_inputs(q_len, kv_len, (4, 2), 24, dtype, batch=2), logits(4, dtype)
    ours = run_ours(inputs, sinks, mask=mask, softmax_scale=0.3)
    assert ours.dsinks.dtype == dtype
    plain, truth = (run_dense_with_sinks(inputs, sinks, mask, of, 0.3) for of in (dtype, torch.float64))
    assert_within_budget(ours, plain, truth)


def test_sinks_are_neither_scaled_nor_capped() -> None:
    inputs, sinks = random_inputs(130, 260, (4, 1), 16, torch.float64), logits(4)
    ours = run_ours(inputs, sinks, causal=True, softmax_scale=-0.7, softcap=0.5)
    truth = run_dense_with_sinks(inputs, sinks, Causal(), torch.float64, scale=-0.7, softcap=0.5)
    assert_within_budget(ours, truth, truth)


@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
def test_gradcheck(mask: Mask) -> None:
    q, k, v, _ = random_inputs(9, 7, (4, 2), 3, torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v, logits(4))]
    assert torch.autograd.gradcheck(lambda q, k, v, s: flash_attn_func(q, k, v, mask=mask, sinks=s), leaves)


def test_a_query_that_attends_nothing_has_the_sink_as_lse() -> None:
    ours = run_ours(random_inputs(300, 100, (2, 1), 16), logits(2, torch.float32), causal=True)
    assert not ours.out[:, :200].any()
    assert not ours.dq[:, :200].any()
    assert torch.equal(ours.lse[:, :, :200], logits(2, torch.float32)[None, :, None].expand(1, 2, 200))


@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 0), (0, 5)])
def test_no_keys_or_no_queries(q_len: int, kv_len: int) -> None:
    ours = run_ours(random_inputs(q_len, kv_len, (4, 2), 16, batch=2), logits(4, torch.bfloat16))
    assert not ours.out.any()
    assert torch.equal(ours.lse, logits(4, torch.bfloat16).float()[None, :, None].expand(2, 4, q_len))
    assert same_bits(ours.dsinks, torch.zeros(4, dtype=torch.bfloat16))


def test_a_sink_of_minus_infinity_is_none() -> None:
    inputs = random_inputs(200, 100, (2, 1), 16)
    ours = run_ours(inputs, torch.full((2,), -torch.inf), causal=True)
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out, lse = flash_attn_func(*leaves, causal=True, return_lse=True)
    for mine, plain in zip(ours, (out.detach(), lse, *torch.autograd.grad(out, leaves, inputs[3])), strict=False):
        assert same_bits(mine, plain)
    assert not ours.dsinks.any()


def test_a_large_sink_takes_everything_and_nothing_overflows() -> None:
    inputs = random_inputs(100, 100, (2, 2), 16)
    ours = run_ours(inputs, torch.tensor([1e4, -1e4]), causal=True)
    assert not ours.out[:, :, 0].any()
    assert all(result.isfinite().all() for result in ours)
    assert torch.equal(ours.out[:, :, 1], flash_attn_func(*inputs[:3], causal=True)[:, :, 1])


def test_only_some_gradients() -> None:
    q, k, v, dout = random_inputs(100, 140, (2, 1), 16)
    full = run_ours((q, k, v, dout), logits(2, torch.float32), causal=True)
    sinks = logits(2, torch.float32).requires_grad_()
    flash_attn_func(q, k, v, causal=True, sinks=sinks).backward(dout)
    assert same_bits(sinks.grad, full.dsinks)
    leaf = q.clone().requires_grad_()
    flash_attn_func(leaf, k, v, causal=True, sinks=sinks.detach()).backward(dout)
    assert same_bits(leaf.grad, full.dq)
    (gradient,) = torch.autograd.grad(flash_attn_func(q, k, v, sinks=sinks).square().sum(), sinks, create_graph=True)
    with pytest.raises(RuntimeError, match="first gradients only"):
        gradient.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_survive_every_interleaving_and_thread_count(dtype: torch.dtype) -> None:
    inputs, sinks = random_inputs(640, 640, (4, 2), 32, dtype, batch=2), logits(4, torch.float32)
    expected = run_ours(inputs, sinks, causal=True)
    assert expected.dsinks.dtype == torch.float32
    for seed in range(4):
        with interleaving(seed, threads=seed == 3):
            assert_same_bits(run_ours(inputs, sinks, causal=True), expected, f"seed {seed}")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert_same_bits(run_ours(inputs, sinks, causal=True), expected, "3 threads")
    finally:
        torch.set_num_threads(before)


def test_the_sum_over_sequences_goes_first_to_last() -> None:
    """A batch gives the bits of its sequences added in their order; another order is another sum."""
    inputs, sinks = random_inputs(200, 200, (4, 2), 32, batch=6), logits(4, torch.float32)
    alone = [run_ours(tuple(x[i : i + 1] for x in inputs), sinks, causal=True).dsinks for i in range(6)]
    together = run_ours(inputs, sinks, causal=True).dsinks
    assert same_bits(sum(alone[1:], alone[0]), together)
    assert not same_bits(sum(alone[-2::-1], alone[-1]), together)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_sequences_have_the_bits_they_have_alone(dtype: torch.dtype) -> None:
    lengths, sinks = [(70, 70), (0, 0), (200, 330), (5, 0), (0, 5), (140, 90)], logits(4, torch.float32)
    parts = [random_inputs(q, k, (4, 2), 16, dtype, seed=i) for i, (q, k) in enumerate(lengths)]
    q, k, v, dout = (torch.cat([part[i][0] for part in parts]) for i in range(4))
    cu_q, cu_k = (torch.tensor(np.cumsum([0, *(pair[i] for pair in lengths)]), dtype=torch.int32) for i in (0, 1))
    leaves = [x.requires_grad_() for x in (q, k, v, sinks)]
    out, lse = flash_attn_varlen_func(*leaves[:3], cu_q, cu_k, 200, 330, causal=True, sinks=sinks, return_lse=True)
    dq, dk, dv, dsinks = torch.autograd.grad(out, leaves, dout)
    total = torch.zeros(4)
    for i, part in enumerate(parts):
        alone = run_ours(part, sinks, causal=True)
        rows, columns = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        packed = WithSinks(out.detach()[None, rows], lse[None, :, rows], dq[None, rows], dk[None, columns], dv[None, columns], alone.dsinks)
        assert_same_bits(packed, alone, f"sequence {i}")
        total += alone.dsinks
    assert same_bits(dsinks, total)


def test_explain_takes_sinks() -> None:
    q, k, v, _ = random_inputs(300, 300)
    assert explain(flash_attn_func, q, k, v, causal=True, sinks=torch.zeros(2)) == explain(flash_attn_func, q, k, v, causal=True)
    with pytest.raises(ValueError, match="sinks must be 2 floating-point numbers"):
        explain(flash_attn_func, q, k, v, sinks=torch.zeros(3))


BAD: list[tuple[Any, type[Exception], str]] = [
    ([0.0, 0.0], TypeError, r"sinks must be a tensor or None; got list"),
    (torch.zeros(1), ValueError, r"sinks must be 2 floating-point numbers, one per query head; got torch.float32 of shape \(1,\)"),
    (torch.zeros(2, 1), ValueError, r"got torch.float32 of shape \(2, 1\)"),
    (torch.zeros(2, dtype=torch.int32), ValueError, r"got torch.int32 of shape \(2,\)"),
    (torch.zeros(2, device="meta"), ValueError, r"sinks must be on the device of q, k and v \(cpu\); got meta"),
]


@pytest.mark.parametrize(("sinks", "error", "message"), BAD, ids=[message for _, _, message in BAD])
def test_bad_sinks(sinks: Any, error: type[Exception], message: str) -> None:
    q, k, v, _ = random_inputs(10, 10)
    cu = torch.tensor([0, 10], dtype=torch.int32)
    with pytest.raises(error, match=message):
        flash_attn_func(q, k, v, sinks=sinks)
    with pytest.raises(error, match=message):
        flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 10, 10, sinks=sinks)
