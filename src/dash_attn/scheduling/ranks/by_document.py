"""Deals a row document by document, so that ranks have equal work."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ..problem import whole_number

UNIT = 128  # rows that every tile divides
LEAST_TILES = 4  # of a chunk; of 1 to 8, this had the best predictions (docs/log.md)
Chunk = tuple[int, int]  # rows, rank


def deal_by_document(lengths: Sequence[int], ranks: int) -> list[Chunk]:
    """The chunks of a row, in its order. A document is dealt in zigzag if its chunks are long enough, or if it is more than the share of
    a rank. The others go whole to the rank with the fewest rows, longest first."""
    rows = [0] * whole_number("ranks", ranks)
    share = sum(whole_number("the length of a document", length) for length in lengths) / ranks
    dealt: dict[int, list[Chunk]] = {}
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        long = lengths[place] >= 2 * ranks * LEAST_TILES * UNIT or lengths[place] > share
        dealt[place] = _zigzag(lengths[place], ranks) if long else [(lengths[place], rows.index(min(rows)))]
        for length, rank in dealt[place]:
            rows[rank] += length
    if 0 in rows:
        raise ValueError(
            f"{len(lengths)} documents of {sum(lengths)} rows cannot be dealt to {ranks} ranks in whole tiles of {UNIT} rows: rank"
            f" {rows.index(0)} would have none. Sharding.zigzag and Sharding.contiguous deal rows without looking at documents"
        )
    return [chunk for place in range(len(lengths)) for chunk in dealt[place]]


def _zigzag(length: int, ranks: int) -> list[Chunk]:
    """In chunks of whole tiles, as equal as can be."""
    there = [*range(ranks), *reversed(range(ranks))]
    tiles = -(-length // UNIT)
    ends = [min(UNIT * (tiles * number // len(there)), length) for number in range(len(there) + 1)]
    return [(end - begin, rank) for (begin, end), rank in zip(pairwise(ends), there, strict=True) if end > begin]
