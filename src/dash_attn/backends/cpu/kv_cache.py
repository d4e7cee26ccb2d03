"""Attention to a cache on the CPU: the keys of each sequence are gathered, and the forward of the whole sequence does the rest.

Queries take the rows that they have among the Q tiles of the whole sequence, so each is computed as there, whatever came with it.
TILE_KV is a multiple of TILE_Q, so leaving out whole tiles of keys moves no query inside its tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...call.call import Call, Saved
from ...call.explain import CACHE_GUARANTEES, CacheExplanation, bytes_at_most, call_in_words
from ...call.kv_cache import CacheCall
from ...call.kv_cache_values import SequenceSlots, check_owners, check_pages, first_attended, slots_of_sequences
from ...call.offsets import SequenceOffsets
from ...call.options import AttentionOptions
from .passes import forward
from .tiles import TILE_KV, TILE_Q, arithmetic


def attention_with_cache(call: CacheCall) -> Saved:
    """Appends what is new, then output and LSE. Everything is checked before anything is written."""
    q, cache, v_cache, options = call[:4]
    queries, sequences = _queries(q, call.offsets), slots_of_sequences(call)
    lowest = [first_attended(options.mask, q_len, s) for s, (_, q_len) in zip(sequences, queries, strict=True)]
    for sequence, low in zip(sequences, lowest, strict=True):
        check_pages(sequence, sequence.slot_of(low), sequence.end, len(cache))
        check_pages(sequence, sequence.length, sequence.end, len(cache))
    check_owners(sequences)
    _append(call, sequences)
    tokens = q if call.offsets is not None else q.flatten(0, 1)
    out = q.new_empty(*tokens.shape[:2], v_cache.shape[3])
    lse = q.new_empty(q.shape[-2], len(tokens), dtype=arithmetic(q.dtype))
    for sequence, (start, q_len), low in zip(sequences, queries, lowest, strict=True):
        rows = slice(start, start + q_len)
        keys, values = (_gather(x, sequence, low) for x in (cache, v_cache))
        out[rows], lse[:, rows] = _attend(tokens[rows], keys, values, options, call.sinks)
    if call.offsets is not None:
        return Saved(out, lse)
    return Saved(out.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous())


def explain_cache(call: CacheCall) -> CacheExplanation:
    return CacheExplanation(
        call=call_in_words(call),
        backend="cpu",
        guarantees=CACHE_GUARANTEES,
        kv_rows=TILE_KV,
        units=len(call.q) * call.q.shape[2],
        served_by="one after another",
        new_keys=call.new,
        read_bytes=bytes_at_most(call),
    )


def _queries(q: Tensor, offsets: SequenceOffsets | None) -> list[tuple[int, int]]:
    """First token and length of each sequence."""
    if offsets is None:
        return [(i * q.shape[1], q.shape[1]) for i in range(len(q))]
    keys = int(offsets.cu_seqlens_k[-1])  # they are in pages, so the offsets alone say how many there are
    return [(rows.start, rows.stop - rows.start) for rows, _ in offsets.sequences(len(q), keys)]


def _append(call: CacheCall, sequences: list[SequenceSlots]) -> None:
    if call.k is None or call.v is None:
        return
    with torch.no_grad():
        for sequence in sequences:
            at = sequence.at(sequence.length, sequence.end)
            call.k_cache[at] = call.k[sequence.number]
            call.v_cache[at] = call.v[sequence.number]


def _gather(cache: Tensor, sequence: SequenceSlots, low: int) -> Tensor:
    """(keys, heads, head dim), without whole tiles that nobody attends. Zeros stand for other such keys: 0 x NaN is NaN."""
    left_out = low // TILE_KV * TILE_KV
    gathered = cache.new_zeros(sequence.keys - left_out, *cache.shape[2:])
    gathered[low - left_out :] = cache[sequence.at(sequence.slot_of(low), sequence.end)]
    return gathered


def _attend(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    before = (len(k) - len(q)) % TILE_Q if len(q) and len(k) else 0
    on_grid = torch.cat([q.new_zeros(before, *q.shape[1:]), q])
    out, lse = forward(Call(on_grid[None], k[None], v[None], options, sinks=sinks))
    return out[0, before:], lse[0, :, before:]
