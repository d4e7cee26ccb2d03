"""Lengths and pages of a cache as numbers, checked before anything is written. For caches in host memory.

On a GPU nobody reads them on the host; the kernels check the same (backends/hopper/kernels/decode/places.cuh).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..masks import IntervalMask, Mask
from .kv_cache import CacheCall

MOST_KEYS = 2**30  # positions are 32-bit numbers on a GPU


@dataclass(frozen=True)
class SequenceSlots:
    """The slots of one sequence: `first` is its first key, `length` the end of what was there, `end` that of what will be.
    `position` is that of its first key.
    """

    number: int
    first: int
    length: int
    end: int
    row: int  # of the cache, if there are no pages
    pages: tuple[int, ...] | None
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
        slots = torch.arange(start, end)
        if self.pages is None:
            return torch.full_like(slots, self.row), slots
        pages = torch.tensor(self.pages, dtype=torch.int64)
        return pages[slots // self.page_size], slots % self.page_size

    def pages_of(self, start: int, end: int) -> list[int]:
        """Indices into the table."""
        return list(range(start // self.page_size, -(-end // self.page_size))) if start < end else []


def slots_of_sequences(call: CacheCall) -> list[SequenceSlots]:
    """Raises where a sequence has no room."""
    cache, new, batch = call.k_cache, call.new, call.sequences
    lengths, positions = (x.tolist() if isinstance(x, Tensor) else [x] * batch for x in (call.cache_seqlens, call.first_position))
    padding = [0] * batch if call.cache_leftpad is None else call.cache_leftpad.tolist()
    rows = list(range(batch)) if call.cache_batch_idx is None else call.cache_batch_idx.tolist()
    tables = [None] * batch if call.block_table is None else [tuple(row) for row in call.block_table.tolist()]
    capacity, found = call.capacity, []
    for i, (length, first, row, pages, position) in enumerate(zip(lengths, padding, rows, tables, positions, strict=True)):
        if not 0 <= length <= capacity:
            raise ValueError(f"cache_seqlens must be between 0 and the {capacity} slots of a sequence; got {length} for sequence {i}")
        if length + new > capacity:
            raise ValueError(
                f"the cache is full: sequence {i} has {length} of {capacity} slots in use and {new} new keys;"
                f" there is room for {capacity - length}"
            )
        if not 0 <= first <= length:
            raise ValueError(f"cache_leftpad must be between 0 and cache_seqlens; got {first} for sequence {i} of {length}")
        if pages is None and not 0 <= row < cache.shape[0]:
            raise ValueError(f"cache_batch_idx must be a row of the cache, 0 to {cache.shape[0] - 1}; got {row} for sequence {i}")
        if not 0 <= position <= MOST_KEYS:
            raise ValueError(f"first_position must be between 0 and {MOST_KEYS}; got {position} for sequence {i}")
        found.append(SequenceSlots(i, first, length, length + new, row, pages, cache.shape[1], position))
    return found


def check_pages(sequence: SequenceSlots, start: int, end: int, count: int) -> None:
    """The pages of some slots exist. Others are not looked at: whoever has no key there may have given them back."""
    if sequence.pages is None:
        return
    for index in sequence.pages_of(start, end):
        page = sequence.pages[index]
        if not 0 <= page < count:
            raise ValueError(
                f"block_table must name pages of the cache, 0 to {count - 1}; got {page} at entry {index} of sequence {sequence.number}"
            )


def check_owners(sequences: list[SequenceSlots]) -> None:
    """No two sequences append to the same page or row, and no sequence twice."""
    owners: dict[int, tuple[int, int]] = {}
    for sequence in sequences:
        if sequence.pages is None:
            places = {0: sequence.row} if sequence.length < sequence.end else {}
        else:
            places = {index: sequence.pages[index] for index in sequence.pages_of(sequence.length, sequence.end)}
        for index, place in places.items():
            other, entry = owners.setdefault(place, (sequence.number, index))
            if (other, entry) == (sequence.number, index):
                continue
            if sequence.pages is None:
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
            f"sequence {sequence.number} attends keys from position {first} on, and the cache begins with {sequence.position}:"
            " keep the keys of the whole window, which the first query of a call decides"
        )
    return first
