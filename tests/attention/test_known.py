"""Calls whose shapes and choices were seen before take a short way. It has the bits of the long one, and refuses what that refuses."""

from __future__ import annotations

import gc
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dash_attn import BooleanMask, Causal, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from dash_attn.attention.observers import observers
from dash_attn.call import boolean_masks

ENDS = torch.tensor([0, 9, 20], dtype=torch.int32)


def inputs(*shape: int, gradients: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).requires_grad_(gradients) for _ in range(3)]


CALLS: dict[str, Any] = {
    "dense": lambda q, k, v: flash_attn_func(q, k, v, causal=True),
    "a mask": lambda q, k, v: flash_attn_func(q, k, v, mask=Causal()),
    "packed": lambda q, k, v: flash_attn_varlen_func(q[0], k[0], v[0], ENDS, ENDS, 11, 11, causal=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_second_call_has_the_bits_of_the_first_and_checks_nothing(name: str) -> None:
    q, k, v = inputs(1, 20, 2, 8)
    first = CALLS[name](q, k, v)
    with patch("dash_attn.attention.functions.new_attention") as dense, patch("dash_attn.attention.varlen.new_attention") as packed:
        second = CALLS[name](q, k, v)
    assert torch.equal(first, second)
    assert not dense.called
    assert not packed.called


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_the_first_call(name: str) -> None:
    leaves = inputs(1, 20, 2, 8, gradients=True)
    first, second = (torch.autograd.grad(CALLS[name](*leaves).sum(), leaves) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_without_gradients_there_is_no_node() -> None:
    q, k, v = inputs(1, 20, 2, 8)
    for _ in range(2):
        assert flash_attn_func(q, k, v).grad_fn is None
        assert flash_attn_func(q.requires_grad_(), k, v).grad_fn is not None
        with torch.no_grad():
            assert flash_attn_func(q, k, v).grad_fn is None
        q = q.detach()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"causal": 1}, "causal must be True or False"),
        ({"causal": True, "window_size": (True, -1)}, "window_size must be"),
        ({"causal": True, "dropout_p": False, "head_offset": False}, "head_offset must be a whole number"),
        ({"causal": True, "softcap": False}, "softcap must be a finite number"),
        ({"causal": True, "return_lse": 0}, "return_lse must be True or False"),
        ({"causal": True, "deterministic": 0}, "deterministic must be True or False"),
    ],
)
def test_what_equals_a_known_choice_but_is_none_is_refused(asked: dict[str, Any], message: str) -> None:
    q, k, v = inputs(1, 20, 2, 8)
    for _ in range(2):
        flash_attn_func(q, k, v, causal=True, window_size=(1, -1), head_offset=0, softcap=0)
        flash_attn_func(q, k, v, causal=True)
    with pytest.raises((TypeError, ValueError), match=message):
        flash_attn_func(q, k, v, **asked)


def test_a_known_call_is_not_differentiated_forward() -> None:
    q, k, v = inputs(1, 20, 2, 8)
    flash_attn_func(q, k, v)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        flash_attn_func(torch.autograd.forward_ad.make_dual(q, q), k, v)


def test_whoever_listens_hears_of_known_calls() -> None:
    q, k, v = inputs(1, 20, 2, 8)
    heard: list[Any] = []

    def observer(call: Any, shared: Any) -> None:
        heard.append(call.options)

    flash_attn_func(q, k, v)
    observers.append(observer)
    try:
        flash_attn_func(q, k, v)
    finally:
        observers.remove(observer)
    assert len(heard) == 1


def test_unordered_sums_are_refused_as_soon_as_pytorch_asks_for_order() -> None:
    q, k, v = inputs(1, 20, 2, 8)
    for _ in range(2):
        flash_attn_func(q, k, v, accumulation="unordered")
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="not reproducible"):
            flash_attn_func(q, k, v, accumulation="unordered")
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_known_call_with_a_cache() -> None:
    q, k, v = inputs(2, 16, 2, 8)
    lengths = torch.tensor([3, 11], dtype=torch.int32)
    first = flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=lengths, causal=True)
    with patch("dash_attn.attention.kv_cache.check_cache") as checks:
        assert torch.equal(flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=lengths, causal=True), first)
        assert not torch.equal(flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=lengths + 2, causal=True), first)
    assert not checks.called
    with pytest.raises(ValueError, match="has no backward, and q requires a gradient"):
        flash_attn_with_kvcache(q[:, :1].clone().requires_grad_(), k, v, cache_seqlens=lengths, causal=True)
    with pytest.raises(ValueError, match="got 17 for sequence 0"):
        flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=lengths + 14, causal=True)


# Boolean tensors


def test_a_tensor_is_read_once_until_it_changes() -> None:
    q, k, v = inputs(1, 128, 2, 8)
    matrix = torch.rand(128, 128, generator=torch.Generator().manual_seed(1)) < 0.5
    first = flash_attn_func(q, k, v, mask=matrix)
    with patch.object(boolean_masks, "BooleanMask") as read:
        assert torch.equal(flash_attn_func(q, k, v, mask=matrix), first)
    assert not read.called
    matrix[5] = ~matrix[5]
    assert torch.equal(flash_attn_func(q, k, v, mask=matrix), flash_attn_func(q, k, v, mask=BooleanMask(matrix)))
    view = matrix[None]
    view[0, 7] = True
    assert torch.equal(flash_attn_func(q, k, v, mask=matrix), flash_attn_func(q, k, v, mask=BooleanMask(matrix)))


def test_masks_go_with_their_tensors() -> None:
    q, k, v = inputs(1, 128, 2, 8)
    before = len(boolean_masks._seen)
    matrix = torch.ones(400, 128, dtype=torch.bool).tril()
    for first in range(2 * boolean_masks.MOST_VIEWS):
        flash_attn_func(q, k, v, mask=matrix[first : first + 128])
    assert len(boolean_masks._seen[matrix]) == boolean_masks.MOST_VIEWS
    assert len(boolean_masks._seen) == before + 1
    del matrix
    gc.collect()
    assert len(boolean_masks._seen) == before


def test_tensors_without_a_count_of_changes_are_read_each_time() -> None:
    q, k, v = inputs(1, 128, 2, 8)
    with torch.inference_mode():
        matrix = torch.ones(128, 128, dtype=torch.bool).tril()
        first = flash_attn_func(q, k, v, mask=matrix)
        matrix[5, 9] = True
        assert not torch.equal(flash_attn_func(q, k, v, mask=matrix), first)


def test_a_backend_that_prepares_nothing_is_asked_once() -> None:
    q, k, v = inputs(1, 20, 2, 8)
    with patch("dash_attn.backends.cpu.prepared", return_value=None) as asked:
        for _ in range(3):
            flash_attn_func(q, k, v)
    assert asked.call_count == 1
