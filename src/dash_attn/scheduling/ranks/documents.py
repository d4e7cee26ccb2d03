"""Documents in a row that ranks share. Each keeps the order that it has alone, so its tiles count from its first row.

A chunk of the row may begin anywhere in a document, and a tile belongs to one rank. So the cuts between chunks are moved inside each
document to the nearest border of its tiles: some rows of a tile that a cut goes through are worked on by the neighbour. After that,
a document is a sequence with chunks of whole tiles, and those of one rank alone need no other.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from ..problem import whole_number
from .sharding import Sharding


@dataclass(frozen=True)
class SharedDocument:
    """`ranks` have its rows: rank i of `sharding` is the row's rank `ranks[i]`."""

    rows: range  # of the row
    sharding: Sharding
    ranks: tuple[int, ...]

    def rows_of(self, rank: int) -> NDArray[np.int64]:
        """The rows that a rank of the row works on."""
        if rank not in self.ranks:
            return np.zeros(0, dtype=np.int64)
        return self.rows.start + self.sharding.rows_of(self.ranks.index(rank)).astype(np.int64)


def deal_documents(row: Sharding, lengths: Sequence[int], unit: int) -> tuple[SharedDocument, ...]:
    """The documents of a row in their order, cut at multiples of `unit` rows only."""
    if sum(lengths) != row.rows:
        raise ValueError(f"the documents of a row have all its {row.rows} rows together; got {sum(lengths)}")
    borders = list(accumulate((whole_number("the length of a document", length) for length in lengths), initial=0))
    chunks = list(zip(row.ends, row.owners, strict=True))
    found = []
    for first, end in pairwise(borders):
        there = slice(bisect_right(row.ends, first), bisect_left(row.ends, end) + 1)
        found.append(_dealt(chunks[there], range(first, end), unit))
    return tuple(found)


def in_turn(documents: Sequence[SharedDocument]) -> list[int]:
    """The order in which ranks take documents, by their places. All ranks keep to it, so none waits for one that waits for it.

    First those that several ranks share, in rounds in which each rank has at most one: else neighbours, which share the documents
    at their borders, would work one after the other. Those of one rank alone come last: nobody waits for them.
    """
    left = [place for place, document in enumerate(documents) if len(document.ranks) > 1]
    alone = [place for place, document in enumerate(documents) if len(document.ranks) == 1]
    order: list[int] = []
    while left:
        busy: set[int] = set()
        for place in left:
            if busy.isdisjoint(documents[place].ranks):
                busy.update(documents[place].ranks)
                order.append(place)
        taken = set(order)
        left = [place for place in left if place not in taken]
    return order + alone


def _dealt(chunks: Sequence[tuple[int, int]], rows: range, unit: int) -> SharedDocument:
    """chunks: (end, rank) of those that have rows of the document."""
    pieces: list[tuple[int, int]] = []  # (rank, rows), in order
    begin = 0
    for end, rank in chunks:
        cut = _moved(end - rows.start, unit, len(rows))
        if cut > begin and pieces and pieces[-1][0] == rank:  # what was between has gone to its neighbours
            pieces[-1] = rank, pieces[-1][1] + cut - begin
        elif cut > begin:
            pieces.append((rank, cut - begin))
        begin = cut
    ranks = tuple(sorted({rank for rank, _ in pieces}))
    sharding = Sharding(tuple(length for _, length in pieces), tuple(ranks.index(rank) for rank, _ in pieces))
    return SharedDocument(rows, sharding, ranks)


def _moved(cut: int, unit: int, length: int) -> int:
    """To the nearest multiple of a unit, or to the end of the document."""
    return min((cut + unit // 2) // unit * unit, length) if cut < length else length
