"""Rows that go to the ranks that work on them, and back: copies, in one exchange between all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..peers import Peers

Places = NDArray[np.int64]  # of rows in the whole, all different
PURPOSE = "exchange the rows of documents"


class Movement:
    """`have` and `want`: by rank, which rows it has before and behind, in its own order. A row that is wanted is had by one rank; it may
    be wanted by many."""

    def __init__(self, have: Sequence[Places], want: Sequence[Places]) -> None:
        self.have, self.want, self.ranks = have, want, range(len(have))
        self._between: dict[tuple[int, int, torch.device], tuple[Tensor, Tensor]] = {}

    def pieces(self, rank: int, rows: Tensor) -> list[Tensor]:
        """Of the rows of a rank, (rows, ...): what each rank gets, in the order of the whole."""
        return [rows[self._common(rank, other, rows.device)[0]] for other in self.ranks]

    def sizes(self, rank: int, device: torch.device) -> list[int]:
        """How many rows a rank gets from each."""
        return [len(self._common(other, rank, device)[1]) for other in self.ranks]

    def sent(self, rank: int) -> int:
        """How many rows go from a rank to others, each as often as it goes."""
        return sum(len(self._common(rank, other, torch.device("cpu"))[0]) for other in self.ranks if other != rank)

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


def move(movement: Movement, peers: Peers, *tensors: Tensor) -> list[Tensor]:
    """Rows are the second dimension of each tensor. All of them travel together."""
    rows = side_by_side(tensors)
    width, sizes = rows.shape[1], movement.sizes(peers.rank, rows.device)
    sent = [piece.flatten() for piece in movement.pieces(peers.rank, rows)]
    received = peers.exchange_pieces(sent, [size * width for size in sizes], PURPOSE)
    together = movement.put_together(peers.rank, [piece.view(-1, width) for piece in received])
    return apart(together, tensors)


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
