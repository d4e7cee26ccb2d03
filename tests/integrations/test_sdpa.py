"""scaled_dot_product_attention answered by dash-attn: PyTorch's meaning, our bits, and PyTorch's function afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from dash_attn import Causal, flash_attn_func
from dash_attn.integrations import sdpa
from dash_attn.integrations.sdpa import scaled_dot_product_attention
from dense import largest_error, random_inputs, run_ours

PYTORCH = functional.scaled_dot_product_attention


def heads_first(q_len: int, kv_len: int, heads: tuple[int, int] = (2, 2), dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [x.transpose(1, 2) for x in random_inputs(q_len, kv_len, heads, 16, dtype, batch=2)]


def run(inputs: list[Tensor], **arguments: Any) -> list[Tensor]:
    """Output and gradients of whatever the name stands for now."""
    *tensors, dout = inputs
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = functional.scaled_dot_product_attention(*leaves, **arguments)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize(("q_len", "kv_len"), [(200, 200), (90, 300), (300, 90), (1, 40), (40, 1)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=str)
def test_means_what_pytorch_means(q_len: int, kv_len: int, is_causal: bool, heads: tuple[int, int]) -> None:
    inputs = heads_first(q_len, kv_len, heads)
    arguments = {"is_causal": is_causal, "scale": 0.3, "enable_gqa": heads[0] != heads[1]}
    expected = run(inputs, **arguments)
    with sdpa.enable():
        ours = run(inputs, **arguments)
    for mine, theirs in zip(ours, expected, strict=True):
        assert mine.shape == theirs.shape
        assert largest_error(mine, theirs) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_are_those_of_flash_attn_func(dtype: torch.dtype) -> None:
    inputs = heads_first(700, 700, (4, 2), dtype)
    lengths_first = tuple(x.transpose(1, 2) for x in inputs)
    with sdpa.enable():
        default = run(inputs, is_causal=True, enable_gqa=True)
    with sdpa.enable(schedule="ascending"):
        other = run(inputs, is_causal=True, enable_gqa=True)
    for found, schedule in ((default, "auto"), (other, "ascending")):
        expected = run_ours(lengths_first, Causal(), schedule=schedule)
        for mine, theirs in zip(found, (expected.out, *expected[2:]), strict=True):
            assert torch.equal(mine.transpose(1, 2), theirs)
    assert not torch.equal(default[1], other[1])


def test_the_name_is_restored_also_after_an_error_and_blocks_nest() -> None:
    with sdpa.enable():
        outer = functional.scaled_dot_product_attention
        assert outer is not PYTORCH
        with pytest.raises(ValueError, match="a mask tensor of numbers"), sdpa.enable():
            run(heads_first(4, 4), attn_mask=torch.ones(4, 4))
        assert functional.scaled_dot_product_attention is outer
    assert functional.scaled_dot_product_attention is PYTORCH


def test_gradients_may_be_taken_after_the_block() -> None:
    q, k, v, dout = heads_first(300, 300, dtype=torch.float32)
    leaf = q.detach().requires_grad_()
    with sdpa.enable():
        out = functional.scaled_dot_product_attention(leaf, k, v, is_causal=True)
        inside = run([q, k, v, dout], is_causal=True)
    out.backward(dout)
    assert torch.equal(leaf.grad, inside[1])


def test_positional_order_is_pytorchs() -> None:
    q, k, v, _ = heads_first(50, 50)
    ours = scaled_dot_product_attention(q, k, v, None, 0.0, True)
    expected = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
    assert torch.equal(ours.transpose(1, 2), expected)


def test_dropout_is_ours_with_seeds_of_the_generator() -> None:
    q, k, v, _ = heads_first(50, 50)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with sdpa.enable():
            runs.append(functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True))
    torch.manual_seed(1)
    expected = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), 0.3, causal=True)
    assert torch.equal(runs[0].transpose(1, 2), expected)
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_ranks_that_share_a_sequence_cannot_draw_seeds() -> None:
    q, k, v, _ = heads_first(50, 50)
    with pytest.raises(ValueError, match=r"need a dropout_seed.*: dropout_p must be 0, or call context_parallel_attention; got 0\.3"):
        scaled_dot_product_attention(q, k, v, dropout_p=0.3, context_parallel=object())


def test_multihead_attention_of_pytorch_uses_it() -> None:
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(32, 2, batch_first=True).double()
    x = torch.randn(2, 150, 32, dtype=torch.float64)
    expected, _ = layer(x, x, x, need_weights=False)
    calls = []

    def count(*arguments: Any, **rest: Any) -> Tensor:
        calls.append(arguments)
        return scaled_dot_product_attention(*arguments, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dash_attn.integrations.sdpa.scaled_dot_product_attention", count)
        with sdpa.enable():
            ours, _ = layer(x, x, x, need_weights=False)
    assert len(calls) == 1
    assert largest_error(ours, expected) < 1e-12


Q, K = torch.zeros(2, 4, 10, 8), torch.zeros(2, 2, 12, 8)
BAD: list[tuple[tuple[Tensor, ...], dict[str, Any], str]] = [
    ((Q, Q, Q), {"attn_mask": torch.ones(10, 10, dtype=torch.bool), "is_causal": True}, r"either attn_mask or is_causal=True.*; got both"),
    ((Q, Q, Q), {"attn_mask": torch.ones(10, 10)}, r"0 where a query attends to a key, and -inf elsewhere; got 1.0"),
    ((Q, Q, Q), {"attn_mask": torch.zeros(10, 10).int()}, r"attn_mask must be boolean.* or of 0 and -inf; got torch.int32"),
    ((Q, Q, Q), {"attn_mask": torch.zeros(10, 10).to(torch.float8_e5m2)}, r"or of 0 and -inf; got torch.float8_e5m2"),
    ((Q, Q, Q), {"attn_mask": torch.ones(1, 1, 1, 10, 10)}, r"attn_mask must not have more dimensions than query, key and value; got"),
    ((Q, Q, Q), {"attn_mask": causal_lower_right(10, 12)}, r"attn_mask is for 10 queries and 12 keys; got 10 and 10"),
    ((Q, Q, Q), {"attn_mask": torch.ones(3, 1, 10, 10).bool()}, r"broadcast to \(2, 4, 10, 10\) .*; got shape \(3, 1, 10, 10\)"),
    ((Q, Q, Q), {"dropout_p": 1.0}, r"dropout_p must be 0, or from 1/65536 to 1 - 1/65536; got 1.0"),
    ((Q[0], Q, Q), {}, r"must be \(..., heads, length, head dim\), or without heads; got query \(4, 10, 8\), key \(2, 4, 10, 8\), value"),
    ((Q[0, 0], Q[0, 0], Q[0, 0]), {"enable_gqa": True}, r"must be \(..., heads, length, head dim\), or without heads; got query \(10, 8\)"),
    ((Q[0], Q[0, :, :, :4], Q[0]), {}, r"same head dim; got query \(4, 10, 8\), key \(4, 10, 4\), value \(4, 10, 8\)"),
    ((Q[None], Q[None], Q[None, ..., :5, :]), {}, r"same length; got query \(1, 2, 4, 10, 8\), .* value \(1, 2, 4, 5, 8\)"),
    ((Q[:, :0], Q[:, :0], Q[:, :0]), {}, r"at least one head and one head dim; got query \(2, 0, 10, 8\), .*: \(..., heads, length"),
    ((Q, K, K), {}, r"same heads unless enable_gqa=True; got query \(2, 4, 10, 8\), key \(2, 2, 12, 8\)"),
    ((Q, K[:, :1].expand(2, 3, 12, 8), K[:, :1].expand(2, 3, 12, 8)), {"enable_gqa": True}, r"multiple of KV heads"),
    ((Q, Q.repeat(2, 1, 1, 1), Q), {}, r"one batch size, or key and value 1; got query \(2, 4, 10, 8\), key \(4, 4, 10, 8\)"),
]


@pytest.mark.parametrize(("tensors", "arguments", "message"), BAD, ids=[message for _, _, message in BAD])
def test_what_cannot_be_done_raises(tensors: tuple[Tensor, ...], arguments: dict[str, Any], message: str) -> None:
    with sdpa.enable(), pytest.raises(ValueError, match=message):
        functional.scaled_dot_product_attention(*tensors, **arguments)


@pytest.mark.parametrize("name", ["shedule", "mask", "softcap", "return_lse"])
def test_unknown_options_raise(name: str) -> None:
    """Also arguments of flash_attn_func that would change what PyTorch's function means."""
    message = f"unexpected keyword argument '{name}'; the options of sdpa.enable are schedule, accumulation, backend, head_offset"
    with pytest.raises(TypeError, match=message), sdpa.enable(**{name: None}):
        pass
    with pytest.raises(TypeError, match=message):
        scaled_dot_product_attention(Q, Q, Q, **{name: None})
    assert functional.scaled_dot_product_attention is PYTORCH


@pytest.mark.parametrize(("name", "message"), [("schedule", "unknown schedule 'no'"), ("backend", "unknown backend 'no'")])
def test_values_that_no_call_could_have_raise_at_the_door(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message), sdpa.enable(**{name: "no"}):
        pytest.fail("inside the block")
    assert functional.scaled_dot_product_attention is PYTORCH


def test_what_multihead_attention_does_not_bring_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/migration.md says so."""
    calls: list[int] = []

    def count(*arguments: Any, **rest: Any) -> Tensor:
        calls.append(1)
        return PYTORCH(*arguments, **rest)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", count)
    layer, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.zeros(1, 3, 8)
    layer(x, x, x)
    with torch.no_grad():
        layer.eval()(x, x, x, need_weights=False)
    assert not calls
    layer.train()(x, x, x, need_weights=False)
    assert calls


@pytest.mark.parametrize("mask", [None, (5, 7), (0, 5, 7)], ids=str)
@pytest.mark.parametrize("grouped", [False, True])
def test_three_dimensions_without_sequences(mask: tuple[int, ...] | None, grouped: bool) -> None:
    """The first dimension is as well a batch as heads, and it may be empty."""
    shapes = (0, 5, 16), (0, 7, 16), (0, 7, 8), (0, 5, 8)
    inputs = [torch.zeros(shape) for shape in shapes]
    arguments = {"attn_mask": None if mask is None else torch.ones(mask, dtype=torch.bool), "enable_gqa": grouped}
    with sdpa.enable():
        found = run(inputs, **arguments)
    assert [x.shape for x in found] == [(0, 5, 8), (0, 5, 16), (0, 7, 16), (0, 7, 8)]
    if not grouped:  # PyTorch 2.11 divides by no heads, which ends the process
        assert [x.shape for x in run(inputs, **arguments)] == [x.shape for x in found]


def test_three_dimensions_without_sequences_are_checked_too() -> None:
    q, k = torch.zeros(0, 5, 16), torch.zeros(3, 5, 16)
    for key, message in ((k, "one batch size"), (k[:0, :, :8], "same head dim"), (k[:0].double(), "one dtype")):
        with pytest.raises(ValueError, match=message):
            scaled_dot_product_attention(q, key, key)
    one = k[:1]  # is broadcast, as in PyTorch
    assert scaled_dot_product_attention(q, one, one).shape == PYTORCH(q, one, one).shape == (0, 5, 16)
