"""Calls whose shapes and choices were seen before take a short way. It has the bits of the long one, and refuses what that refuses."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dash_attn import BooleanMask, Causal, backends, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from dash_attn.attention import known as known_calls
from dash_attn.attention.observers import observers
from dash_attn.call import boolean_masks
from launchless import launchless_driver

ENDS = torch.tensor([0, 9, 20], dtype=torch.int32)
DOUT = torch.ones(1, 200, 2, 64, dtype=torch.bfloat16)


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


def test_a_matrix_is_known_with_its_gradients_until_it_changes() -> None:
    leaves = inputs(1, 128, 2, 8, gradients=True)
    matrix = torch.rand(128, 128, generator=torch.Generator().manual_seed(1)) < 0.5

    def gradients(mask: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(flash_attn_func(*leaves, mask=mask).square().sum(), leaves)

    first, _ = gradients(matrix), gradients(matrix)
    with patch("dash_attn.attention.functions.new_attention") as looked:
        again = gradients(matrix)
        of_a_mask = BooleanMask(matrix)
    assert not looked.called
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    matrix[5] = ~matrix[5]
    for _ in range(3):
        assert not torch.equal(gradients(matrix)[0], first[0])
        assert torch.equal(gradients(of_a_mask)[0], first[0])


def test_dropout_with_a_known_matrix_draws_each_time() -> None:
    q, k, v = inputs(1, 128, 2, 8)
    matrix = torch.ones(128, 128, dtype=torch.bool).tril()
    outs = [flash_attn_func(q, k, v, mask=matrix, dropout_p=0.5) for _ in range(4)]
    assert not any(torch.equal(outs[0], other) for other in outs[1:])


def test_calls_with_a_matrix_go_with_it() -> None:
    q, k, v = inputs(1, 128, 2, 8)
    gc.collect()
    before = len(known_calls._of_masks)
    matrix = torch.ones(128, 128, dtype=torch.bool).tril()
    for _ in range(3):
        flash_attn_func(q, k, v, mask=matrix)
    assert len(known_calls._of_masks) == before + 1
    del matrix
    gc.collect()
    assert len(known_calls._of_masks) == before


# Backwards on a driver that launches nothing


@pytest.fixture
def hopper() -> Iterator[Any]:
    with launchless_driver() as driver, patch.dict(backends.DEVICE_OF, hopper="cpu"):
        yield driver
    backends.backend_for.cache_clear()  # without the patch, the one for CPU tensors is an error again


def on_hopper(*leaves: Tensor, **options: Any) -> Any:
    return flash_attn_func(*(x.bfloat16() for x in leaves), causal=True, backend="hopper", **options)


def test_a_known_backward_is_found_without_a_key(hopper: Any) -> None:
    leaves = inputs(1, 200, 2, 64, gradients=True)
    for _ in range(2):
        torch.autograd.grad(on_hopper(*leaves), leaves, DOUT)
    hopper.launched.clear()
    with patch("dash_attn.backends.hopper.calls.backward._calls.find") as find:
        torch.autograd.grad(on_hopper(*leaves), leaves, DOUT)
    assert not find.called
    assert [name for name, _ in hopper.launched][1:] == ["backward_preprocess", "attention_backward", "backward_postprocess"]


def test_gradients_of_other_strides_and_tensors_of_hooks_are_prepared_for(hopper: Any) -> None:
    leaves = inputs(1, 200, 2, 64, gradients=True)
    kept = import_module("dash_attn.backends.hopper.calls.backward")._calls._kept.values

    def backward(dout: Tensor, pack: Any = lambda x: x) -> None:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = on_hopper(*leaves)
        torch.autograd.grad(out, leaves, dout)

    plain = DOUT
    turned = torch.ones(1, 2, 200, 64, dtype=torch.bfloat16).transpose(1, 2)
    for dout in (plain, turned, plain, turned):
        backward(dout)
    assert len(kept) == 2
    wide = torch.zeros(1, 200, 2, 128, dtype=torch.bfloat16)
    backward(plain, lambda x: wide[..., :64].copy_(x) if x.shape == plain.shape else x)
    assert len(kept) == 3


def test_a_backward_of_legs_is_never_taken_for_prepared(hopper: Any) -> None:
    leaves = inputs(1, 200, 2, 64, gradients=True)
    backward = import_module("dash_attn.backends.hopper.calls.backward")
    with patch.object(backward, "BackwardInLegs", backward.BackwardCall):  # as if every call were one
        for _ in range(2):
            torch.autograd.grad(on_hopper(*leaves), leaves, DOUT)
        with patch.object(backward._calls, "find", wraps=backward._calls.find) as find:
            torch.autograd.grad(on_hopper(*leaves), leaves, DOUT)
    assert find.called


def test_a_gradient_that_tma_cannot_read_leaves_others_prepared(hopper: Any) -> None:
    leaves = inputs(1, 200, 2, 64, gradients=True)
    for dout in (DOUT[:, :, :1, :1].expand_as(DOUT), DOUT):
        torch.autograd.grad(on_hopper(*leaves), leaves, dout)
    with patch("dash_attn.backends.hopper.calls.backward._calls.find") as find:
        torch.autograd.grad(on_hopper(*leaves), leaves, DOUT)
    assert not find.called


def test_a_backend_that_prepares_nothing_is_asked_once() -> None:
    q, k, v = inputs(1, 20, 2, 8)
    with patch("dash_attn.backends.cpu.prepared", return_value=None) as asked:
        for _ in range(3):
            flash_attn_func(q, k, v)
    assert asked.call_count == 1
