"""Rows that go to the ranks that work on them, and back: copies, in one exchange between all ranks."""

import math
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..peers import Peers
from .rows import by_head, by_row
from .shared_call import SharedCall, own_documents

Places = NDArray[np.int64]  # of rows in the whole, all different
PURPOSE = "exchange the rows of documents"


class Movement:
    """`have` and `want`: by rank, which rows it has before and behind, in its own order. A row that is wanted is had by one rank; it may
    be wanted by many."""

    def __init__(self, have: Sequence[Places], want: Sequence[Places]) -> None:
        self.have, self.want, self.ranks = have, want, range(len(have))
        self._between: dict[tuple[int, int, torch.device], tuple[Tensor, Tensor]] = {}

    @cached_property
    def still(self) -> bool:
        """Whether every rank has what it wants."""
        return self.have is self.want or all(map(np.array_equal, self.have, self.want))

    def pieces(self, rank: int, rows: Tensor) -> list[Tensor]:
        """Of the rows of a rank, (rows, ...): what each rank gets, in the order of the whole."""
        return [rows[self._common(rank, other, rows.device)[0]] for other in self.ranks]

    def sizes(self, rank: int, device: torch.device) -> list[int]:
        """How many rows a rank gets from each."""
        return [len(self._common(other, rank, device)[1]) for other in self.ranks]

    def sent(self, rank: int) -> int:
        """How many rows go from a rank to others, each as often as it goes."""
        others = () if self.still else (other for other in self.ranks if other != rank)
        return sum(len(self._common(rank, other, torch.device("cpu"))[0]) for other in others)

    def put_together(self, rank: int, pieces: Sequence[Tensor]) -> Tensor:
        """The rows that a rank wants, from the pieces that it got from each."""
        found = pieces[0].new_empty(len(self.want[rank]), *pieces[0].shape[1:])
        for other, piece in zip(self.ranks, pieces, strict=True):
            found[self._common(other, rank, found.device)[1]] = piece
        return found

    def _common(self, source: int, target: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Rows that go from one rank to another: where they are there, and where they come here. Every layer asks again."""
        key = source, target, device
        if key not in self._between:
            _, there, here = np.intersect1d(self.have[source], self.want[target], assume_unique=True, return_indices=True)
            self._between[key] = torch.from_numpy(there).to(device), torch.from_numpy(here).to(device)
        return self._between[key]


class Moves:
    """Which rows ranks exchange. Rows of a rank that works on several documents are those of the first document, then those of the next."""

    def __init__(self, call: SharedCall) -> None:
        self.call, self.documents, self.ranks = call, call.documents, range(call.sharding.ranks)

    @cached_property
    def _own(self) -> list[Places]:
        return [self.call.sharding.rows_of(rank).astype(np.int64) for rank in self.ranks]

    @cached_property
    def _worked_on(self) -> list[Places]:
        if self.call.is_one:
            return self._own
        return [_joined([document.rows_of(rank) for document in self.documents]) for rank in self.ranks]

    @cached_property
    def to_workers(self) -> Movement:
        """Rows go to the ranks that work on them."""
        return Movement(self._own, self._worked_on)

    @cached_property
    def back(self) -> Movement:
        return Movement(self._worked_on, self._own)

    @cached_property
    def keys(self) -> Movement:
        """Every rank gets all rows of the documents that it works on."""
        want = [_joined([np.array(one.document.rows) for one in own_documents(self.call, rank)]) for rank in self.ranks]
        return Movement(self._own, want)

    @cached_property
    def tiles(self) -> Movement:
        """Q tiles of each document, to its first rank. Tiles count on from document to document."""
        have: list[list[Places]] = [[] for _ in self.ranks]
        want: list[list[Places]] = [[] for _ in self.ranks]
        firsts = accumulate((document.problem.q_tiles for document in self.documents), initial=0)
        for document, first in zip(self.documents, firsts, strict=False):
            sharding, problem = document.sharding, document.problem
            owners = np.array(document.ranks)[np.array(sharding.owners)[sharding.chunk_of_tiles(problem.tile_q)]]
            want[document.ranks[0]].append(first + np.arange(problem.q_tiles))
            for rank in document.ranks:
                have[rank].append(first + np.flatnonzero(owners == rank))
        return Movement([_joined(some) for some in have], [_joined(some) for some in want])

    @cached_property
    def sums(self) -> Movement:
        """One per document, from its first rank to the first rank of all."""
        have = [[document.number for document in self.documents if document.ranks[0] == rank] for rank in self.ranks]
        want = [np.arange(0 if rank else len(self.documents)) for rank in self.ranks]
        return Movement([np.array(some, dtype=np.int64) for some in have], want)


@lru_cache(maxsize=16)
def moves_of(call: SharedCall) -> Moves:
    return Moves(call)


def _joined(some: Sequence[NDArray[Any]]) -> Places:
    return np.concatenate([np.zeros(0, dtype=np.int64), *some])


def move(movement: Movement, peers: Peers, rows: Sequence[Tensor], of_heads: Sequence[Tensor | None] = ()) -> list[Tensor]:
    """Rows are the second dimension of `rows`, and the last of `of_heads`, which may be missing where nothing moves. All of them travel
    together."""
    if movement.still:
        return [*rows, *of_heads]  # type: ignore[list-item]
    tensors = [*rows, *(by_row(x) for x in of_heads if x is not None)]
    flat = side_by_side(tensors)
    width, sizes = flat.shape[1], movement.sizes(peers.rank, flat.device)
    sent = [piece.flatten() for piece in movement.pieces(peers.rank, flat)]
    received = peers.exchange(sent, [size * width for size in sizes], PURPOSE)
    moved = apart(movement.put_together(peers.rank, [piece.view(-1, width) for piece in received]), tensors)
    return [*moved[: len(rows)], *map(by_head, moved[len(rows) :])]


def side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    """(batch, rows, ...) each -> bytes, (rows, bytes of all)."""
    rows = tensors[0].shape[1]
    return torch.cat([_flat(x.detach().transpose(0, 1)).view(torch.uint8).view(rows, _bytes_of_a_row(x)) for x in tensors], dim=1)


def apart(rows: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The other way round, for tensors with as many rows as there are now."""
    parts = rows.split([_bytes_of_a_row(x) for x in like], dim=1)
    return [
        _flat(part).view(x.dtype).view(len(rows), x.shape[0], *x.shape[2:]).transpose(0, 1).contiguous()
        for part, x in zip(parts, like, strict=True)
    ]


def _flat(x: Tensor) -> Tensor:
    """A copy: parts of other tensors need not begin where numbers of another dtype may."""
    return x.clone(memory_format=torch.contiguous_format).flatten()


def _bytes_of_a_row(x: Tensor) -> int:
    return math.prod((x.shape[0], *x.shape[2:])) * x.element_size()
