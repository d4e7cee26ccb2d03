"""Which rows ranks exchange, where a row that they share has documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np

from .documents import DocumentCall, SharedDocuments
from .moving import Movement, Places


@dataclass(frozen=True, eq=False)
class Moves:
    """Rows of a rank that works on several documents are those of the first document, then those of the next."""

    to_workers: Movement  # rows go to the ranks that work on them
    back: Movement
    keys: Movement  # every rank gets all rows of the documents that it works on
    tiles: Movement  # Q tiles of each document, to its first rank
    sums: Movement  # one per document, from there to the first rank of all


@lru_cache(maxsize=16)
def moves_of(row: SharedDocuments) -> Moves:
    documents, ranks = row.documents, range(row.sharding.ranks)
    own = [row.sharding.rows_of(rank).astype(np.int64) for rank in ranks]
    worked_on = [_joined([document.place.rows_of(rank) for document in documents]) for rank in ranks]
    keys = [_joined([np.array(document.place.rows) for document in documents if rank in document.ranks]) for rank in ranks]
    return Moves(
        Movement(own, worked_on),
        Movement(worked_on, own),
        Movement(own, keys),
        _tiles_to_first(documents, ranks),
        Movement([_first_in(documents, rank) for rank in ranks], [np.arange(0 if rank else len(documents)) for rank in ranks]),
    )


def _first_in(documents: Sequence[DocumentCall], rank: int) -> Places:
    """The documents whose first rank this is."""
    return np.array([document.number for document in documents if document.ranks[0] == rank], dtype=np.int64)


def _tiles_to_first(documents: Sequence[DocumentCall], ranks: range) -> Movement:
    """Tiles count on from document to document."""
    have: list[list[Places]] = [[] for _ in ranks]
    want: list[list[Places]] = [[] for _ in ranks]
    firsts = accumulate((document.call.problem.q_tiles for document in documents), initial=0)
    for document, first in zip(documents, firsts, strict=False):
        sharding, problem = document.call.sharding, document.call.problem
        owners = np.array(document.ranks)[np.array(sharding.owners)[sharding.chunk_of_tiles(problem.tile_q)]]
        want[document.ranks[0]].append(first + np.arange(problem.q_tiles))
        for rank in document.ranks:
            have[rank].append(first + np.flatnonzero(owners == rank))
    return Movement([_joined(some) for some in have], [_joined(some) for some in want])


def _joined(some: Sequence[Places]) -> Places:
    return np.concatenate([np.zeros(0, dtype=np.int64), *some])
