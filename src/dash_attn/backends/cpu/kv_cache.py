"""Attention to a cache on the CPU: the keys of each sequence are gathered, and the forward of the whole sequence does the rest.

Lengths and pages are read and checked before anything is written. On a GPU nobody reads them on the host; the kernels check the same
(backends/hopper/kernels/decode/places.cuh).

Queries take the rows that they have among the Q tiles of the whole sequence, so each is computed as there, whatever came with it. More
queries than keys are a whole sequence of their own.
TILE_KV is a multiple of TILE_Q, so leaving out whole tiles of keys moves no query inside its tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...call.call import Call, Saved
from ...call.explain import CacheExplanation, explanation_of_cache
from ...call.kv_cache import CacheCall
from ...call.offsets import SequenceOffsets
from ...call.options import AttentionOptions
from ...masks import IntervalMask, Mask
from .passes import forward
from .tiles import TILE_KV, TILE_Q, arithmetic

MOST_KEYS = 2**30  # positions are 32-bit numbers on a GPU


def prepared(call: CacheCall) -> None:
    """Nothing: what a call needs is in its values."""


def attention_with_cache(call: CacheCall) -> Saved:
    """Appends what is new, then output and LSE. Everything is checked before anything is written."""
    q, cache, v_cache, options = call[:4]
    queries, sequences = _queries(q, call.offsets), slots_of_sequences(call)
    lowest = [first_attended(options.mask, q_len, s) for s, (_, q_len) in zip(sequences, queries, strict=True)]
    for sequence, low in zip(sequences, lowest, strict=True):
        check_pages(sequence, sequence.slot_of(low), sequence.end, len(cache))
        check_pages(sequence, sequence.length, sequence.end, len(cache))
    check_owners(sequences, call.block_table is not None)
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
    return explanation_of_cache(call, "cpu", kv_rows=TILE_KV, units=len(call.q) * call.q.shape[2], served_by="one after another")


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
    before = max(0, len(k) - len(q)) % TILE_Q if len(q) else 0
    on_grid = torch.cat([q.new_zeros(before, *q.shape[1:]), q])
    out, lse = forward(Call(on_grid[None], k[None], v[None], options, sinks=sinks))
    return out[0, before:], lse[0, :, before:]


@dataclass(frozen=True)
class SequenceSlots:
    """The slots of one sequence: `first` is its first key, `length` the end of what was there, `end` that of what will be.
    `position` is that of its first key. A row of a cache without a block table is the one page of its sequence.
    """

    number: int
    first: int
    length: int
    end: int
    pages: Sequence[int]
    page_size: int
    position: int = 0

    @property
    def keys(self) -> int:
        """With those that the cache dropped."""
        return self.position + self.end - self.first

    def slot_of(self, key: int) -> int:
        return self.first + key - self.position

    def at(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Where slots are in the first two axes of the cache."""
        slots, pages = torch.arange(start, end), torch.tensor(self.pages, dtype=torch.int64)
        return pages[slots // self.page_size], slots % self.page_size

    def pages_of(self, start: int, end: int) -> list[int]:
        """Indices into the table."""
        return list(range(start // self.page_size, -(-end // self.page_size))) if start < end else []


def slots_of_sequences(call: CacheCall) -> list[SequenceSlots]:
    """Raises where a sequence has no room."""
    cache, new, batch = call.k_cache, call.new, call.sequences
    lengths, positions = (x.tolist() if isinstance(x, Tensor) else [x] * batch for x in (call.cache_seqlens, call.first_position))
    padding = [0] * batch if call.cache_leftpad is None else call.cache_leftpad.tolist()
    rows = torch.arange(batch) if call.cache_batch_idx is None else call.cache_batch_idx
    tables = (rows[:, None] if call.block_table is None else call.block_table).tolist()
    capacity, found = call.capacity, []
    for i, (length, first, pages, position) in enumerate(zip(lengths, padding, tables, positions, strict=True)):
        if not 0 <= length <= capacity:
            raise ValueError(f"cache_seqlens must be between 0 and the {capacity} slots of a sequence; got {length} for sequence {i}")
        if length + new > capacity:
            raise ValueError(
                f"the cache is full: sequence {i} has {length} of {capacity} slots in use and {new} new keys;"
                f" there is room for {capacity - length}"
            )
        if not 0 <= first <= length:
            raise ValueError(f"cache_leftpad must be between 0 and cache_seqlens; got {first} for sequence {i} of {length}")
        if call.block_table is None and not 0 <= pages[0] < cache.shape[0]:
            raise ValueError(f"cache_batch_idx must be a row of the cache, 0 to {cache.shape[0] - 1}; got {pages[0]} for sequence {i}")
        if not 0 <= position <= MOST_KEYS:
            raise ValueError(f"first_position must be between 0 and {MOST_KEYS}; got {position} for sequence {i}")
        found.append(SequenceSlots(i, first, length, length + new, pages, cache.shape[1], position))
    return found


def check_pages(sequence: SequenceSlots, start: int, end: int, count: int) -> None:
    """The pages of some slots exist. Others are not looked at: whoever has no key there may have given them back."""
    for index in sequence.pages_of(start, end):
        page = sequence.pages[index]
        if not 0 <= page < count:
            raise ValueError(
                f"block_table must name pages of the cache, 0 to {count - 1}; got {page} at entry {index} of sequence {sequence.number}"
            )


def check_owners(sequences: list[SequenceSlots], in_pages: bool) -> None:
    """No two sequences append to the same page or row, and no sequence twice."""
    owners: dict[int, tuple[int, int]] = {}
    for sequence in sequences:
        for index in sequence.pages_of(sequence.length, sequence.end):
            place = sequence.pages[index]
            other, entry = owners.setdefault(place, (sequence.number, index))
            if (other, entry) == (sequence.number, index):
                continue
            if not in_pages:
                raise ValueError(
                    "cache_batch_idx must name different rows where keys are appended;"
                    f" sequences {other} and {sequence.number} have row {place}"
                )
            raise ValueError(
                f"a page can be appended to by one sequence only, at one place; page {place} is entry {entry} of sequence {other}"
                f" and entry {index} of sequence {sequence.number}"
            )


def first_attended(mask: Mask, queries: int, sequence: SequenceSlots) -> int:
    """The first key that any of the queries attends: with a window, keys before it need not be there any more."""
    assert isinstance(mask, IntervalMask), "caches take full and causal masks and windows"
    if queries == 0:
        return sequence.keys
    first = int(mask.clipped_bounds(np.arange(1), queries, sequence.keys)[0][0])
    if first < min(sequence.position, sequence.keys):
        raise ValueError(
            f"sequence {sequence.number} attends to keys from position {first} on, and the cache begins with {sequence.position}:"
            " keep the keys of the whole window, which the first query of a call decides"
        )
    return first
