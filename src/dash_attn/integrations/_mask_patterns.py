"""Which of our masks a boolean pattern is. The pattern is read in blocks of rows, so memory stays linear in the length."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..masks import Causal, Documents, Full, IntervalMask, Window

Pattern = Callable[[int, range, range], Tensor]  # (sequence, rows, columns) -> boolean matrix
Bounds = tuple[NDArray[np.int64], NDArray[np.int64]]
ROWS = 256


def mask_of_pattern(pattern: Pattern, batch: int, q_len: int, kv_len: int) -> IntervalMask:
    """The mask that keeps exactly this pattern in every sequence of the batch, or an error."""
    first, end = _row_bounds(pattern, 0, q_len, kv_len)
    for sequence in range(1, batch):
        if not _equal(_row_bounds(pattern, sequence, q_len, kv_len), (first, end)):
            raise ValueError(
                "dash_attn has one mask for the whole batch: lay documents of different lengths in one row, with batch size 1."
                " Chunked attention counts from the first token, so with it rows cannot be padded on the left"
            )
    rows = np.arange(q_len)
    for mask in _candidates(first, end, q_len, kv_len):
        if _equal(mask.clipped_bounds(rows, q_len, kv_len), (first, end)):
            return mask
    raise NotImplementedError(
        "dash_attn supports causal, bidirectional, sliding-window and packed-document masks; this mask is none of them"
    )


def _row_bounds(pattern: Pattern, sequence: int, q_len: int, kv_len: int) -> Bounds:
    """First kept key and end of the kept keys of each row. Every row must keep one interval."""
    first, end = np.zeros(q_len, np.int64), np.zeros(q_len, np.int64)
    for start in range(0, q_len, ROWS):
        rows = range(start, min(start + ROWS, q_len))
        kept = pattern(sequence, rows, range(kv_len)).to(torch.uint8)
        lowest = kept.argmax(1)
        count = kept.sum(1)
        highest = kv_len - kept.flip(1).argmax(1)
        if not ((highest - lowest) == count).all():
            raise NotImplementedError("dash_attn supports masks in which every query attends one interval of keys; this one has gaps")
        first[start : rows.stop], end[start : rows.stop] = lowest.cpu().numpy(), highest.cpu().numpy()
    return first, end


def _candidates(first: NDArray[np.int64], end: NDArray[np.int64], q_len: int, kv_len: int) -> list[IntervalMask]:
    """Masks this can be, by what a few rows look like; the caller compares every row."""
    diagonal = np.arange(q_len) + (kv_len - q_len)
    left, right = int((diagonal - first).max()), int((end - 1 - diagonal).max())
    starts = np.flatnonzero(np.diff(first, prepend=-1))
    documents = tuple(np.diff(starts, append=q_len).tolist())
    candidates: list[IntervalMask] = [Causal(), Full()]
    if left >= 0 and right >= 0:
        candidates.append(Window(left, right))
    if q_len == kv_len:
        candidates += [Documents(documents), Documents(documents, causal=False)]
    return candidates


def _equal(one: Bounds, other: Bounds) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
