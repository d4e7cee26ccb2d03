"""Which rank has which rows of a sequence, or of a row of documents.

Each document of a row keeps the order that it has alone, so its tiles count from its first row. A chunk of the row may begin anywhere in
a document, and a tile belongs to one rank. So the cuts between chunks are moved inside each document to the nearest border of its tiles:
some rows of a tile that a cut goes through are worked on by the neighbour. After that, a document is a sequence with chunks of whole
tiles, and those of one rank alone need no other.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from ..order import frozen_ints
from ..problem import Problem, whole_number

SHARDINGS = ("zigzag", "contiguous")
UNIT = 128  # rows that every tile divides
LEAST_TILES = 4  # of a chunk of a document; of 1 to 8, this had the best predictions (docs/log.md)
Chunk = tuple[int, int]  # rows, rank


class CutTile(ValueError):
    """Chunks that are no multiples of `unit` rows."""

    def __init__(self, words: str, unit: int, advice: str) -> None:
        super().__init__(f"{words}. {advice}")
        self.words, self.unit = words, unit


@dataclass(frozen=True)
class Sharding:
    """Chunk i of a sequence is `lengths[i]` consecutive rows, on rank `owners[i]`.

    `zigzag` and `contiguous` make the usual ones, with chunks of equal length. Other lengths are for sequences that those do not fit.
    One rank alone has chunks of queries; its keys may be of another length.
    """

    lengths: tuple[int, ...]
    owners: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(whole_number("the length of a chunk", length) for length in self.lengths))
        object.__setattr__(self, "owners", tuple(whole_number("the rank of a chunk", owner, least=0) for owner in self.owners))
        if not self.lengths or len(self.lengths) != len(self.owners):
            raise ValueError(f"a sharding has one rank per chunk; got {len(self.lengths)} lengths and {len(self.owners)} ranks")
        # Of more ranks than chunks, one below that number has none: no set of them all, however many are named.
        if without := set(range(min(self.ranks, self.chunks))) - set(self.owners):
            raise ValueError(f"every rank needs a chunk; rank {min(without)} of {self.ranks} has none")

    @classmethod
    def zigzag(cls, rows: int, ranks: int) -> Sharding:
        """Rank p has chunks p and 2 * ranks - 1 - p: equal work under a causal mask."""
        there = list(range(whole_number("ranks", ranks)))
        return cls.equal(rows, (*there, *reversed(there)), "zigzag")

    @classmethod
    def contiguous(cls, rows: int, ranks: int) -> Sharding:
        return cls.equal(rows, tuple(range(whole_number("ranks", ranks))), "contiguous")

    @classmethod
    def by_document(cls, lengths: Sequence[int], ranks: int) -> Sharding:
        """For a row of documents of these lengths: equal work under a causal mask, and no cut through a tile. Long documents,
        whose chunks are long enough, or that are more than the share of a rank, are dealt in zigzag, each by itself. The others go whole
        to the rank with the fewest rows, longest first. Ranks may have different numbers of rows."""
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
        chunks = [chunk for place in range(len(lengths)) for chunk in dealt[place]]
        return cls(tuple(length for length, _ in chunks), tuple(rank for _, rank in chunks))

    @classmethod
    def named(cls, name: str, rows: int, ranks: int) -> Sharding:
        if name not in SHARDINGS:
            raise ValueError(f"unknown sharding {name!r}; choose from {', '.join(SHARDINGS)}, or give a Sharding")
        if whole_number("ranks", ranks) > whole_number("rows", rows):  # before anything is made for each
            raise ValueError(f"{rows:,} row{'s' * (rows > 1)} cannot be dealt to {ranks:,} ranks")
        made: Sharding = getattr(cls, name)(rows, ranks)
        return made

    @classmethod
    def equal(cls, rows: int, owners: tuple[int, ...], name: str) -> Sharding:
        """Chunks of one length."""
        chunks = len(owners)
        if whole_number("rows", rows) % chunks:
            raise ValueError(
                f"{name} sharding of {max(owners) + 1} ranks has {chunks} chunks of equal length; {rows} rows cannot be dealt so"
                f" (but {_around(rows, chunks)} can). A Sharding with lengths of its own can"
            )
        return cls((rows // chunks,) * chunks, owners)

    @property
    def rows(self) -> int:
        return sum(self.lengths)

    @property
    def ranks(self) -> int:
        return max(self.owners) + 1

    @property
    def chunks(self) -> int:
        return len(self.lengths)

    @property
    def ends(self) -> tuple[int, ...]:
        """The row behind each chunk."""
        return tuple(accumulate(self.lengths))

    def rows_of_chunk(self, chunk: int) -> range:
        end = self.ends[chunk]
        return range(end - self.lengths[chunk], end)

    def chunks_of(self, rank: int) -> list[int]:
        """Of a rank, in the order in which it keeps them."""
        return [chunk for chunk, owner in enumerate(self.owners) if owner == rank]

    def rows_of(self, rank: int) -> NDArray[np.int32]:
        """The rows of a rank, in the order in which it keeps them."""
        return frozen_ints(np.concatenate([np.array(self.rows_of_chunk(chunk)) for chunk in self.chunks_of(rank)]))

    def chunk_of_tiles(self, tile: int) -> NDArray[np.int32]:
        """The chunk of each tile of `tile` rows. Chunks are multiples of a tile."""
        firsts = np.arange(0, self.rows, tile)
        return frozen_ints(np.searchsorted(self.ends, firsts, side="right"))

    def chunk_of_kv_tiles(self, problem: Problem) -> NDArray[np.int32]:
        """The chunk of each tile of keys. One rank has all of them, so there they count as the first chunk's."""
        return frozen_ints(np.zeros(problem.kv_tiles, dtype=np.int32)) if self.ranks == 1 else self.chunk_of_tiles(problem.tile_kv)

    def check(self, problem: Problem) -> None:
        """Raise ValueError unless this shards the problem's queries and keys; CutTile where it cuts one."""
        if not problem.q_len == problem.kv_len == self.rows:
            raise ValueError(
                f"queries and keys of a sharded sequence are the same {self.rows} rows; got {problem.q_len} queries and"
                f" {problem.kv_len} keys"
            )
        unit = math.lcm(problem.tile_q, problem.tile_kv)
        if cut := [length for length in self.lengths[:-1] if length % unit]:
            raise CutTile(
                f"chunks must be multiples of {unit} rows, so that no tile of {problem.tile_q} queries or {problem.tile_kv} keys is cut"
                f" (the last chunk may end anywhere); got a chunk of {cut[0]}",
                unit,
                self.that_fit(unit),
            )

    def that_fit(self, unit: int) -> str:
        """For errors: sequences whose chunks of equal length are multiples of as many rows."""
        chunks = self.rows // math.gcd(*self.lengths)  # of one length; those that follow each other on one rank may have been joined
        if chunks > 2 * self.chunks:
            return "Give a Sharding with other lengths"
        fitting = _around(self.rows, unit * chunks)
        return f"{chunks} chunks of equal length fit sequences of {fitting} rows; pad to that, or give a Sharding with lengths of its own"


def _around(rows: int, step: int) -> str:
    """For errors: the multiples next to a number."""
    below = rows // step * step
    return " or ".join(str(fitting) for fitting in (below, below + step) if fitting)


def _zigzag(length: int, ranks: int) -> list[Chunk]:
    """In chunks of whole tiles, as equal as can be."""
    there = [*range(ranks), *reversed(range(ranks))]
    tiles = -(-length // UNIT)
    ends = [min(UNIT * (tiles * number // len(there)), length) for number in range(len(there) + 1)]
    return [(end - begin, rank) for (begin, end), rank in zip(pairwise(ends), there, strict=True) if end > begin]


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
