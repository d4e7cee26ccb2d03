"""Tokens that attend to a cache have the bits of the whole forward, whatever came with them and wherever their keys lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cached import NAN, CacheCase, Played, play
from dash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from dense import same_bits

OPTIONS: list[dict[str, Any]] = [{}, {"window_size": (40, 0)}, {"softcap": 3.0}, {"softmax_scale": 0.3, "window_size": (130, 0)}]


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("page_size", "most_padding"), [(0, 0), (0, 70), (16, 0), (48, 33), (256, 0)])
def test_bits_are_those_of_the_whole_forward(page_size: int, most_padding: int, options: dict[str, Any]) -> None:
    case = CacheCase((300, 129, 64, 1), page_size=page_size, most_padding=most_padding, options=options, sinks=page_size == 16)
    assert play(case) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (40, 24), (192, 128)], ids=str)
def test_dtypes_and_dims(dims: tuple[int, int], dtype: torch.dtype) -> None:
    assert play(CacheCase((150, 70), (3, 1), dims, dtype, page_size=32, seed=1)) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(60))
def test_any_way_through_a_cache(seed: int) -> None:
    source = torch.Generator().manual_seed(seed)

    def draw(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (), generator=source))]

    lengths = tuple(int(torch.randint(1, 500, (), generator=source)) for _ in range(draw(1, 3, 5)))
    case = CacheCase(
        lengths,
        heads=draw((1, 1), (4, 4), (6, 2), (8, 1), (70, 1)),
        dims=draw((64, 64), (128, 128), (32, 48)),
        dtype=draw(torch.bfloat16, torch.float32),
        page_size=draw(0, 16, 80, 128),
        most_padding=draw(0, 0, 200),
        options=draw(*OPTIONS),
        sinks=draw(True, False),
        seed=seed,
    )
    assert play(case) == []


def test_a_shift_on_the_tile_grid_changes_bits() -> None:
    """The control: the same keys for the same query, but counted from another slot."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 64) for n in (1, 300, 300))
    expected = flash_attn_with_kvcache(q, k, v, causal=True)
    shift, zeros = 37, torch.zeros(1, 37, 2, 64)
    shifted = flash_attn_with_kvcache(q, torch.cat([zeros, k], 1), torch.cat([zeros, v], 1), causal=True, window_size=(299, 0))
    padded = flash_attn_with_kvcache(
        q, torch.cat([zeros, k], 1), torch.cat([zeros, v], 1), cache_seqlens=300 + shift, cache_leftpad=numbers(shift), causal=True
    )
    assert not same_bits(shifted, expected)
    torch.testing.assert_close(shifted, expected)
    assert same_bits(padded, expected), "left padding does not count as a position"


def test_sdpa_has_other_bits() -> None:
    """The control: attention of one query by PyTorch."""
    played = Played(CacheCase((200,), dtype=torch.float32, chunks=(1,)))
    q, k, v = (x.transpose(1, 2) for x in played.tensors[0])
    out, _ = played.whole(0)
    with torch.no_grad():
        decoded = torch.nn.functional.scaled_dot_product_attention(q[:, :, -1:], k, v, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(decoded, out[:, -1:])
    assert not same_bits(decoded, out[:, -1:])


def test_only_the_new_slots_are_written() -> None:
    played = Played(CacheCase((50, 90), page_size=16, chunks=(7,)))
    before = [cache.clone() for cache in played.caches]
    played.call([1, 0], [0, 0], 20)
    for which, (cache, old) in enumerate(zip(played.caches, before, strict=True)):
        changed = ~(cache.isnan() & old.isnan()).all(-1).all(-1)
        assert int(changed.sum()) == 40
        for number in (0, 1):
            first, second = played.table[number, :2].tolist()
            assert same_bits(torch.cat([cache[first], cache[second, :4]]), played.tensors[number][which + 1][0, :20])


def test_without_lengths_all_slots_are_keys() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 4, 16), torch.randn(2, 50, 2, 16), torch.randn(2, 50, 2, 16)
    expected = flash_attn_func(q, k, v, causal=True)
    assert same_bits(flash_attn_with_kvcache(q, k, v, causal=True), expected)
    assert same_bits(flash_attn_with_kvcache(q, k, v, cache_seqlens=50, causal=True), expected)
    pages = numbers(0, 2, 1)[None].expand(2, -1).contiguous()
    cache = torch.randn(3, 16, 2, 16)
    whole = cache[pages[0].long()].flatten(0, 1)[None].expand(2, -1, -1, -1)
    assert same_bits(flash_attn_with_kvcache(q, cache, cache, block_table=pages), flash_attn_func(q, whole, whole))


def test_pages_before_the_window_may_be_gone() -> None:
    """Their entries are not read, and neither is what their slots hold."""
    played = Played(CacheCase((200,), page_size=16, options={"window_size": (30, 0)}, chunks=(1,)))
    out, lse = played.whole(0)
    played.call([0], [0], 199)
    played.table[0, : (199 - 30) // 16] = -7
    rest = played.table[0, (199 - 30) // 16].item()
    played.caches[0][rest, : (199 - 30) % 16], played.caches[1][rest, : (199 - 30) % 16] = NAN, NAN
    played.call([0], [199], 1)
    assert same_bits(played.out[0][-1], out[:, -1:])
    assert same_bits(played.lse[0][-1], lse[:, :, -1:])


@pytest.mark.parametrize("first", [0, 37, 128, 229])
@pytest.mark.parametrize("most_padding", [0, 9])
def test_a_cache_that_dropped_keys_says_their_positions(first: int, most_padding: int) -> None:
    """A window of 40 keys before each query: for the last 31 of 300 tokens, all before position 229 may be gone."""
    played = Played(CacheCase((300,), dtype=torch.float32, options={"window_size": (40, 0)}))
    q, k, v = played.tensors[0]
    out, lse = played.whole(0)
    rows = slice(269, 300)
    caches = [torch.cat([torch.full_like(x[:, :most_padding], NAN), x[:, first:269], torch.full_like(x[:, :50], NAN)], 1) for x in (k, v)]
    used = most_padding + 269 - first
    places: dict[str, Any] = {"cache_seqlens": used, "cache_leftpad": numbers(most_padding), "first_position": numbers(first)}
    new, options = (k[:, rows], v[:, rows]), {"causal": True, "window_size": (40, 0), "return_softmax_lse": True}
    ours = flash_attn_with_kvcache(q[:, rows], *(x.clone() for x in caches), *new, **places, **options)
    assert same_bits(ours[0], out[:, rows])
    assert same_bits(ours[1], lse[:, :, rows].contiguous())
    silent = flash_attn_with_kvcache(q[:, rows], *caches, *new, **{**places, "first_position": 0}, **options)
    torch.testing.assert_close(silent[0], out[:, rows])
    assert same_bits(silent[0], out[:, rows]) == (first % 128 == 0), "the control: tiles are cut elsewhere"


def test_nothing_to_attend() -> None:
    q, cache, sinks = torch.randn(2, 3, 4, 16), torch.full((2, 8, 2, 16), NAN), torch.randn(4)
    out, lse = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=0, return_softmax_lse=True)
    assert not out.any()
    assert (lse == -torch.inf).all()
    out, lse = flash_attn_with_kvcache(
        q, cache, cache, cache_seqlens=numbers(5, 0), cache_leftpad=numbers(5, 0), sinks=sinks, return_softmax_lse=True
    )
    assert not out.any()
    assert torch.equal(lse, sinks[None, :, None].expand(2, 4, 3))
    none = flash_attn_with_kvcache(q[:, :0], cache, cache.clone(), torch.ones(2, 1, 2, 16), torch.ones(2, 1, 2, 16), cache_seqlens=3)
    assert none.shape == (2, 0, 4, 16)
    assert (cache[:, 3] == 1).all(), "keys are appended though nobody asks"


@pytest.mark.parametrize(("q_len", "kv_len"), [(90, 40), (73, 14), (66, 60), (200, 1)])
def test_more_queries_than_keys(q_len: int, kv_len: int) -> None:
    """Then the call is the whole sequence, so the first query begins the first Q tile."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, q_len, 2, 15), torch.randn(1, kv_len, 2, 15), torch.randn(1, kv_len, 2, 9)
    ours = flash_attn_with_kvcache(q, k, v, causal=True, return_softmax_lse=True)
    expected = flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert all(same_bits(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_packed_queries_and_pages(options: dict[str, Any]) -> None:
    """Rows of four whole forwards at once: a prefill, a chunk, a decode and a sequence without queries."""
    case = CacheCase((140, 200, 77, 30), page_size=32, options=options, chunks=(300,))
    played = Played(case)
    played.run()
    last = (140, 33, 1, 0)
    wholes = [played.whole(i) for i in range(4)]
    q = torch.cat([played.tensors[i][0][0, length - n :] for i, (length, n) in enumerate(zip(case.lengths, last, strict=True))])
    ends_q, ends_k = (numbers(0, *torch.tensor(x).cumsum(0).tolist()) for x in (last, case.lengths))
    out, lse = flash_attn_varlen_func(
        q, *played.caches, ends_q, ends_k, 140, 200, causal=True, block_table=played.table, return_lse=True, **options
    )
    for i, (start, end) in enumerate(zip(ends_q[:-1].tolist(), ends_q[1:].tolist(), strict=True)):
        rows = slice(case.lengths[i] - last[i], None)
        assert same_bits(out[start:end], wholes[i][0][0, rows]), f"out of sequence {i}"
        assert same_bits(lse[:, start:end].contiguous(), wholes[i][1][0, :, rows].contiguous()), f"LSE of sequence {i}"
