"""Which rank has which rows of a sequence."""

from __future__ import annotations

import math
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
    """Chunk i of a sequence is `lengths[i]` rows that follow each other. Rank `owners[i]` has it.

    `zigzag` and `contiguous` make the usual ones, with chunks of one length. Other lengths are for sequences that those do not fit.
    One rank alone has chunks of queries; its keys may be of another length.
    """

    lengths: tuple[int, ...]
    owners: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(whole_number("the length of a chunk", length) for length in self.lengths))
        object.__setattr__(self, "owners", tuple(whole_number("the rank of a chunk", owner, least=0) for owner in self.owners))
        if not self.lengths or len(self.lengths) != len(self.owners):
            raise ValueError(f"a sharding has one rank per chunk; got {len(self.lengths)} lengths and {len(self.owners)} ranks")
        without = set(range(self.ranks)) - set(self.owners)
        if without:
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
        """For a row of documents of these lengths: equal work under a causal mask, and no cut through a tile. Long documents are dealt in
        zigzag, each by itself; the others are whole. Ranks may have different numbers of rows."""
        chunks = _deal_by_document(lengths, ranks)
        return cls(tuple(length for length, _ in chunks), tuple(rank for _, rank in chunks))

    @classmethod
    def named(cls, name: str, rows: int, ranks: int) -> Sharding:
        if name not in SHARDINGS:
            raise ValueError(f"unknown sharding {name!r}; choose from {', '.join(SHARDINGS)}, or give a Sharding")
        made: Sharding = getattr(cls, name)(rows, ranks)
        return made

    @classmethod
    def equal(cls, rows: int, owners: tuple[int, ...], name: str) -> Sharding:
        """Chunks of one length."""
        chunks = len(owners)
        if whole_number("rows", rows) % chunks:
            raise ValueError(
                f"{name} sharding of {max(owners) + 1} ranks has {chunks} chunks of one length; {rows} rows cannot be dealt so"
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
        cut = [length for length in self.lengths[:-1] if length % unit]
        if cut:
            raise CutTile(
                f"chunks must be multiples of {unit} rows, so that no tile of {problem.tile_q} queries or {problem.tile_kv} keys is cut"
                f" (the last chunk may end anywhere); got a chunk of {cut[0]}",
                unit,
                self.that_fit(unit),
            )

    def that_fit(self, unit: int) -> str:
        """For errors: sequences whose chunks of one length are multiples of as many rows."""
        chunks = self.rows // math.gcd(*self.lengths)  # of one length; those that follow each other on one rank may have been joined
        if chunks > 2 * self.chunks:
            return "Give a Sharding with other lengths"
        fitting = _around(self.rows, unit * chunks)
        return f"{chunks} chunks of one length fit sequences of {fitting} rows; pad to that, or give a Sharding with lengths of its own"


def _around(rows: int, step: int) -> str:
    """For errors: the multiples next to a number."""
    below = rows // step * step
    return " or ".join(str(fitting) for fitting in (below, below + step) if fitting)


def _deal_by_document(lengths: Sequence[int], ranks: int) -> list[Chunk]:
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
