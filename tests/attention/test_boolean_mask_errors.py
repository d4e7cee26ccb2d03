"""Boolean masks that are refused, each by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.bias import causal_lower_right

from dash_attn import BooleanMask, Causal, TileMap, flash_attn_func, flash_attn_varlen_func, parse_mask
from dash_attn.masks import TilePattern

Q, K = torch.zeros(2, 10, 4, 8), torch.zeros(2, 12, 2, 8)
ONES = torch.ones(10, 12, dtype=torch.bool)
BAD: list[tuple[Any, type[Exception], str]] = [
    (ONES.T, ValueError, r"must be \(10, 12\) \(q_len, kv_len\), or broadcast to \(2, 4, 10, 12\) .*; got shape \(12, 10\)"),
    (ONES.expand(2, 10, 12), ValueError, r"got shape \(2, 10, 12\)"),  # dimensions are aligned from the right: these would be heads
    (ONES.expand(2, 2, 10, 12), ValueError, r"got shape \(2, 2, 10, 12\)"),  # KV heads, not query heads
    (ONES.expand(1, 1, 1, 10, 12), ValueError, r"got shape \(1, 1, 1, 10, 12\)"),
    (ONES[0], ValueError, r"got shape \(12,\)"),
    (ONES.float(), ValueError, r"must have 0 where a query attends to a key, and -inf elsewhere; got 1.0"),
    (torch.full((10, 12), torch.finfo(torch.float32).min), ValueError, r"and -inf elsewhere; got -3.4"),
    (torch.full((10, 12), torch.nan), ValueError, r"and -inf elsewhere; got nan"),
    (torch.zeros(10, 12, requires_grad=True), ValueError, r"a mask tensor gets no gradient"),
    (ONES.to(torch.uint8), ValueError, r"must be boolean.*got torch.uint8"),
    (ONES.to("meta"), ValueError, r"must be on the device of q, k and v \(cpu\); got meta"),
    (ONES.to_sparse(), ValueError, r"mask tensor must be dense \(layout torch.strided\); got a sparse_coo tensor"),
    (torch.nested.nested_tensor([ONES]), ValueError, r"must be dense \(layout torch.strided\); got a nested tensor"),
    (causal_lower_right(10, 12), ValueError, r"PyTorch's CausalBias has none: causal_lower_right is causal=True here"),
    (BooleanMask(ONES[:9]), ValueError, r"got shape \(9, 12\)"),
    (BooleanMask(ONES[:1]), ValueError, r"got shape \(1, 12\)"),
    (ONES.numpy(), TypeError, r"got a boolean array of shape \(10, 12\). flash_attn_func also takes a boolean tensor or a BooleanMask"),
    (ONES.numpy(), TypeError, r"flash_attn_varlen_func a list, one mask per sequence"),
    (ONES.tolist(), TypeError, r"flash_attn_func also takes a boolean tensor or a BooleanMask"),
    (TilePattern(np.array([[1]], dtype=np.uint8)), TypeError, r"its elements come with a call: give flash_attn_func the BooleanMask"),
]


@pytest.mark.parametrize(("mask", "error", "message"), BAD, ids=[message[:40] for _, _, message in BAD])
def test_other_masks_raise(mask: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        flash_attn_func(Q, K, K, mask=mask)


@pytest.mark.parametrize("array", [np.ones((2, 2)), np.ones(3, dtype=bool), np.ones((0, 2), dtype=bool), np.ones((1,) * 5, dtype=bool)])
def test_boolean_masks_are_made_of_booleans(array: Any) -> None:
    with pytest.raises(ValueError, match=r"must be boolean, not empty and of shape \(q_len, kv_len\), or"):
        BooleanMask(array)


UNREADABLE: list[tuple[Any, str]] = [
    ([[True], [True, False]], "list: setting an array element with a sequence"),
    (ONES.to("meta"), "Tensor: can't convert meta device type tensor to numpy"),
    (ONES.to_sparse(), "Tensor: can't convert Sparse layout tensor to numpy"),
    (torch.nested.nested_tensor([ONES]), "Tensor: "),
]


@pytest.mark.parametrize(("given", "reason"), UNREADABLE, ids=[reason for _, reason in UNREADABLE])
def test_what_is_no_matrix_is_named(given: Any, reason: str) -> None:
    needed = "must be a dense boolean array or tensor, all rows equally long; got"
    with pytest.raises(ValueError, match=f"^a boolean mask {needed} {reason}"):
        BooleanMask(given)
    with pytest.raises(ValueError, match=f"^a tile map {needed} {reason}"):
        TileMap(given, 64, 64)


@pytest.mark.parametrize("text", [None, 3, b"causal", ONES, Causal()], ids=lambda given: type(given).__name__)
def test_a_mask_is_read_from_text(text: Any) -> None:
    with pytest.raises(TypeError, match=r"a mask is read from text, written full, causal, .*; got (None|3|b'causal'|a boolean t|Causal)"):
        parse_mask(text)


def test_a_matrix_of_numbers_is_told_how_to_become_boolean() -> None:
    numbers = torch.nn.Transformer.generate_square_subsequent_mask(10)
    with pytest.raises(ValueError, match=r"got float32 of shape \(10, 10\); of a matrix of 0 and -inf take `matrix == 0`$"):
        BooleanMask(numbers)
    q = torch.randn(1, 10, 2, 8)
    assert torch.equal(flash_attn_func(q, q, q, mask=BooleanMask(numbers == 0)), flash_attn_func(q, q, q, mask=numbers))


GIVEN: list[tuple[Any, str]] = [
    (ONES, r"a boolean tensor of shape \(10, 12\)"),
    (ONES.tril(), r"a boolean tensor of shape \(10, 12\)"),
    (ONES.expand(2, 4, 10, 12), r"a boolean tensor of shape \(2, 4, 10, 12\)"),
    (torch.zeros(10, 12), r"a torch.float32 tensor of shape \(10, 12\)"),
    (BooleanMask(ONES.tril()), r"BooleanMask\(shape=\(10, 12\), matrices=1, nbytes=\d+\)"),
    (ONES.numpy(), r"a boolean array of shape \(10, 12\)"),
]


@pytest.mark.parametrize(("mask", "shown"), GIVEN, ids=[shown for _, shown in GIVEN])
def test_an_error_shows_what_was_given_not_what_it_became(mask: Any, shown: str) -> None:
    with pytest.raises(ValueError, match=f"either mask or causal/window_size; got mask={shown}, causal=True"):
        flash_attn_func(Q, K, K, mask=mask, causal=True)
    ends = torch.tensor([0, 10], dtype=torch.int32)
    pages, table = torch.zeros(1, 16, 2, 8), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"full or causal mask or a window; got mask={shown}$"):
        flash_attn_varlen_func(Q[0], pages, pages, ends, ends, 10, 10, mask=mask, block_table=table)


def test_packed_sequences_take_no_matrix() -> None:
    tokens, ends = torch.zeros(10, 4, 8), torch.tensor([0, 4, 10], dtype=torch.int32)
    for mask in (ONES, BooleanMask(ONES)):
        with pytest.raises(TypeError, match="mask must be a dash_attn mask"):
            flash_attn_varlen_func(tokens, tokens, tokens, ends, ends, 6, 6, mask=mask)  # type: ignore[call-overload]
