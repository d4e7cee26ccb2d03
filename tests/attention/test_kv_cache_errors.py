"""What a cache refuses, with words that name it, and without having written anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dash_attn import Documents, flash_attn_varlen_func, flash_attn_with_kvcache


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def table(*rows: tuple[int, ...]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def good(pages: bool) -> dict[str, Any]:
    """Two sequences of 20 and 33 keys, each with 3 new ones, in rows of 48 slots or pages of 16."""
    arguments: dict[str, Any] = {
        "q": torch.zeros(2, 3, 4, 16),
        "k": torch.ones(2, 3, 2, 16),
        "v": torch.ones(2, 3, 2, 16),
        "cache_seqlens": numbers(20, 33),
        "k_cache": torch.zeros(8, 16, 2, 16) if pages else torch.zeros(3, 48, 2, 16),
    }
    arguments["v_cache"] = arguments["k_cache"].clone()
    if pages:
        arguments["block_table"] = table((5, 6, -1), (2, 3, 4))
    return arguments


Bad = tuple[dict[str, Any], str]
EITHER: list[Bad] = [
    ({"cache_seqlens": numbers(20, 47)}, r"cache is full: sequence 1 has 47 of 48 slots in use and 3 new keys; there is room for 1"),
    ({"cache_seqlens": numbers(20, 49)}, r"cache_seqlens must be between 0 and the 48 slots .* got 49 for sequence 1"),
    ({"cache_seqlens": numbers(-1, 33)}, r"cache_seqlens must be between 0 and the 48 slots .* got -1 for sequence 0"),
    ({"cache_seqlens": 46}, r"cache is full: sequence 0 has 46 of 48"),
    ({"cache_seqlens": -1}, r"cache_seqlens must be a whole number >= 0 .* got -1"),
    ({"cache_seqlens": True}, r"cache_seqlens must be a whole number >= 0 .* got True"),
    ({"cache_seqlens": None}, r"cache_seqlens must say how many there are; got None"),
    ({"cache_seqlens": numbers(20, 33).long()}, r"cache_seqlens must be an int32 tensor of 2 numbers; got torch.int64"),
    ({"cache_seqlens": numbers(20)}, r"cache_seqlens must be an int32 tensor of 2 numbers; got torch.int32 of shape \(1,\)"),
    ({"cache_seqlens": numbers(20, 33).to("meta")}, r"cache_seqlens must be on the device of q \(cpu\); got meta"),
    ({"cache_leftpad": numbers(0, 34)}, r"cache_leftpad must be between 0 and cache_seqlens; got 34 for sequence 1 of 33"),
    ({"cache_leftpad": numbers(-2, 0)}, r"cache_leftpad must be between 0 and cache_seqlens; got -2"),
    ({"k_cache": torch.zeros(8, 48, 2, 16).half()}, r"k_cache must have the dtype of q \(torch.float32\); got torch.float16"),
    ({"v_cache": torch.zeros(8, 48, 2, 16, device="meta")}, r"v_cache must be on the device of q \(cpu\); got meta"),
    ({"k_cache": torch.zeros(8, 48, 32)}, r"k_cache must be 4-d"),
    ({"v_cache": torch.zeros(8, 32, 2, 16)}, r"k_cache and v_cache may differ in the head dim only"),
    ({"k": torch.ones(2, 3, 2, 16).half()}, r"k must be like k_cache \(torch.float32 on cpu\); got torch.float16"),
    ({"k": torch.ones(2, 3, 4, 16)}, r"k must be \(batch, new tokens, KV heads, head dim\)"),
    ({"v": torch.ones(2, 2, 2, 16)}, r"v must be .* as many new tokens in v as in k"),
    ({"v": None}, r"k and v must be given together; got k alone"),
    ({"q": torch.zeros(2, 3, 3, 16)}, r"query heads must be a multiple of KV heads"),
    ({"q": torch.zeros(2, 3, 4, 8)}, r"same head dim"),
    ({"rotary_cos": torch.ones(9, 4), "rotary_sin": torch.ones(9, 4)}, r"need as many queries as new keys|rotary_cos must have a row"),
    ({"alibi_slopes": torch.ones(4)}, r"a cache has no ALiBi: alibi_slopes must be None. flash_attn_func on the whole sequence has it"),
    ({"num_splits": 2}, r"num_splits must be 0 or 1.* got 2"),
    ({"sinks": torch.ones(3)}, r"sinks must be 4 floating-point numbers"),
    ({"softmax_scale": 0.0}, r"softmax_scale must be a finite number other than 0"),
    ({"window_size": (-2, 0)}, r"window_size must be"),
    ({"backend": "hopper"}, r"needs cuda tensors"),
    ({"q": torch.zeros(2, 3, 4, 16, requires_grad=True)}, r"no backward, and q requires a gradient"),
]
ROWS: list[Bad] = [
    ({"first_position": 5}, r"sequence 0 attends to keys from position 0 on, and the cache begins with 5"),
    ({"first_position": 5, "cache_leftpad": numbers(0, 12), "window_size": (30, 0)}, r"attends to keys from position 0 on"),
    ({"first_position": -1}, r"first_position must be a whole number >= 0 and below 2\^31, .* got -1"),
    ({"first_position": numbers(0, -4)}, r"first_position must be between 0 and 1073741824; got -4 for sequence 1"),
    ({"cache_batch_idx": numbers(1, 3)}, r"cache_batch_idx must be a row of the cache, 0 to 2; got 3 for sequence 1"),
    ({"cache_batch_idx": numbers(-1, 1)}, r"cache_batch_idx must be a row of the cache, 0 to 2; got -1 for sequence 0"),
    ({"k_cache": torch.zeros(1, 48, 2, 16).expand(3, -1, -1, -1)}, r"k_cache must have memory for every slot .* strides \(0, 32, 16, 1\)"),
    ({"v_cache": torch.zeros(3, 48, 2, 1).expand(-1, -1, -1, 16)}, r"v_cache must have memory for every slot .* strides \(96, 2, 1, 0\)"),
    ({"cache_batch_idx": numbers(1, 1)}, r"different rows where keys are appended; sequences 0 and 1 have row 1"),
    ({"k_cache": torch.zeros(1, 48, 2, 16), "v_cache": torch.zeros(1, 48, 2, 16)}, r"a row for each of the 2 sequences of q; got 1"),
]
PAGES: list[Bad] = [
    ({"first_position": 16}, r"first_position must be 0 with block_table"),
    ({"block_table": table((5, 8, -1), (2, 3, 4))}, r"block_table must name pages of the cache, 0 to 7; got 8 at entry 1 of sequence 0"),
    ({"block_table": table((5, 6, -1), (-1, 3, 4))}, r"0 to 7; got -1 at entry 0 of sequence 1"),
    ({"block_table": table((5, 6, -1), (2, 3, 6))}, r"page 6 is entry 1 of sequence 0 and entry 2 of sequence 1"),
    (
        {"cache_seqlens": numbers(30, 33), "block_table": table((5, 6, 6), (2, 3, 4))},
        r"page 6 is entry 1 of sequence 0 and entry 2 of sequence 0",
    ),
    ({"cache_seqlens": numbers(31, 33)}, r"got -1 at entry 2 of sequence 0"),
    ({"block_table": table((5, 6), (2, 3))}, r"cache_seqlens must be between 0 and the 32 slots .* got 33 for sequence 1"),
    ({"block_table": numbers(5, 6)}, r"block_table must be 2-d, \(sequences, entries\); got shape \(2,\)"),
    ({"block_table": table((5, 6, 7))}, r"block_table must be an int32 tensor of 2 x 3 numbers; got torch.int32 of shape \(1, 3\)"),
    ({"block_table": table((5, 6, -1), (2, 3, 4)).long()}, r"block_table must be an int32 tensor of 2 x 3 numbers; got torch.int64"),
    ({"cache_batch_idx": numbers(0, 1)}, r"cache_batch_idx must be None"),
    ({"k_cache": torch.zeros(8, 24, 2, 16), "v_cache": torch.zeros(8, 24, 2, 16)}, r"pages must have a multiple of 16 rows"),
]


@pytest.mark.parametrize("pages", [True, False])
def test_the_arguments_that_the_errors_start_from_are_good(pages: bool) -> None:
    arguments = good(pages)
    assert flash_attn_with_kvcache(**arguments).shape == (2, 3, 4, 16)
    assert arguments["k_cache"].sum() == 2 * 3 * 2 * 16


@pytest.mark.parametrize(
    ("pages", "changes", "message"),
    [*((False, *bad) for bad in (*EITHER, *ROWS)), *((True, *bad) for bad in (*EITHER[:4], *EITHER[10:12], *PAGES))],
)
def test_refused_before_anything_is_written(pages: bool, changes: dict[str, Any], message: str) -> None:
    arguments = {**good(pages), **changes}
    before = [arguments[name].clone() for name in ("k_cache", "v_cache")]
    with pytest.raises((ValueError, TypeError), match=message):
        flash_attn_with_kvcache(**arguments)
    for name, old in zip(("k_cache", "v_cache"), before, strict=True):
        assert arguments[name].is_meta or torch.equal(arguments[name], old), f"{name} was written"


def test_readers_may_share_what_nobody_appends_to() -> None:
    """The control of two errors: a page, or a row, of two sequences is fine as long as it is only read."""
    arguments = {**good(pages=True), "k": None, "v": None, "block_table": table((5, 6, -1), (5, 6, 4))}
    assert flash_attn_with_kvcache(**arguments).shape == (2, 3, 4, 16)
    shared = {**good(pages=False), "k": None, "v": None, "cache_batch_idx": numbers(1, 1)}
    assert flash_attn_with_kvcache(**shared).shape == (2, 3, 4, 16)


def test_gradients_may_be_switched_off() -> None:
    q = torch.zeros(2, 3, 4, 16, requires_grad=True)
    with torch.no_grad():
        assert not flash_attn_with_kvcache(**{**good(pages=True), "q": q}).requires_grad


PACKED: list[tuple[dict[str, Any], str]] = [
    ({"block_table": table((1, 2))}, r"block_table must be an int32 tensor of 2 x 2 numbers; got .* \(1, 2\)"),
    ({"block_table": table((1, 9), (2, 3))}, r"0 to 7; got 9 at entry 1 of sequence 0"),
    ({"block_table": table((1,), (2,))}, r"between 0 and the 16 slots of a sequence; got 20 for sequence 0"),
    ({"block_table": [[1, 2], [2, 3]]}, r"block_table must be a tensor; got list"),
    ({"k": torch.zeros(128, 2, 16)}, r"k_cache must be 4-d"),
    ({"cu_seqlens_k": numbers(0, 20, 10)}, r"cu_seqlens_k must not decrease"),
    ({"cu_seqlens_q": numbers(0, 3, 4)}, r"cu_seqlens_q must start at 0 and end at .*\(5\)"),
    ({"max_seqlen_k": 10}, r"max_seqlen_k must be at least the longest sequence \(20\); got 10"),
    ({"mask": Documents((5,))}, r"keys in pages take a full or causal mask or a window"),
    ({"schedule": "ascending"}, r"nothing to schedule"),
    ({"accumulation": "unordered"}, r"accumulation must be 'ordered'"),
    ({"dropout_p": 0.5}, r"no dropout and no ALiBi: .* got dropout_p=0.5"),
    ({"alibi_slopes": torch.ones(4)}, r"no dropout and no ALiBi: .* got alibi_slopes"),
    ({"q": torch.zeros(5, 4, 16, requires_grad=True)}, r"no backward, and q requires a gradient"),
]


@pytest.mark.parametrize(("changes", "message"), [({}, ""), *PACKED])
def test_packed_queries(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "q": torch.zeros(5, 4, 16),
        "k": torch.zeros(8, 16, 2, 16),
        "v": torch.zeros(8, 16, 2, 16),
        "cu_seqlens_q": numbers(0, 3, 5),
        "cu_seqlens_k": numbers(0, 20, 30),
        "max_seqlen_q": 3,
        "max_seqlen_k": 20,
        "block_table": table((1, 2), (2, 3)),
        **changes,
    }
    if not message:
        assert flash_attn_varlen_func(**arguments).shape == (5, 4, 16)
        return
    with pytest.raises((ValueError, TypeError), match=message):
        flash_attn_varlen_func(**arguments)


@pytest.mark.parametrize("pages", [False, True])
def test_one_tensor_for_keys_and_values(pages: bool) -> None:
    """New values would replace new keys. Where these are one tensor, too, or none is new, nothing is lost."""
    arguments = good(pages)
    one = {**arguments, "v_cache": arguments["k_cache"]}
    with pytest.raises(ValueError, match="k_cache and v_cache are one tensor, in which the new values would replace the new keys"):
        flash_attn_with_kvcache(**one)
    flash_attn_with_kvcache(**{**one, "v": one["k"]})
    flash_attn_with_kvcache(**{**one, "k": None, "v": None})
