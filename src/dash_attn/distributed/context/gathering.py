"""Rows of all ranks, put together in the order of the sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...scheduling.ranks.sharding import Sharding
from ..peers import REACH_OTHERS, Peers, Pending
from .rows import rows_of
from .shared_call import Document, OwnDocument


def gather_rows(peers: Peers, sharding: Sharding, x: Tensor) -> Tensor:
    """(rows of a rank, ...) -> (all rows, ...)."""
    return _put_together(_start(peers, sharding, x, REACH_OTHERS), sharding, x.shape[1:])


def _start(peers: Peers, sharding: Sharding, x: Tensor, purpose: str) -> Pending:
    """Ranks with fewer rows send as many as the others, because a gather has one shape."""
    most = max(len(sharding.rows_of(rank)) for rank in range(peers.count))
    padded = x if len(x) == most else torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])])
    return peers.start_gather(padded.contiguous().flatten(), purpose)


def _put_together(gather: Pending, sharding: Sharding, shape: Sequence[int]) -> Tensor:
    """shape: of a row."""
    everything = gather.wait().view(sharding.ranks, -1, *shape)
    whole = everything.new_empty(sharding.rows, *shape)
    for rank, part in enumerate(everything):
        mine = rows_of(sharding, rank, whole.device)
        whole[mine] = part[: len(mine)]
    return whole


class Keys:
    """The keys and values of a document, some KV heads at a time. Where each rank has its own rows, they come in one gather after the
    other, in the order of their numbers."""

    def __init__(self, document: Document, k: Tensor, v: Tensor, peers: Peers | None = None) -> None:
        """peers: with whom the rows are shared; None: all of them are here."""
        self.document, self.k, self.v, self.peers = document, k, v, peers
        self.started: list[Pending | None] = []

    def start(self, number: int) -> None:
        """Let this gather, and those before it, begin. All ranks must do so sooner or later."""
        while self.peers is not None and len(self.started) <= number:
            both = torch.cat([x.flatten(2) for x in self._some(len(self.started))], dim=2).transpose(0, 1)
            self.started.append(_start(self.peers, self.document.sharding, both, self._purpose(self.peers, len(self.started))))

    def get(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a gather that was started."""
        if self.peers is None:
            return self._some(number)
        gather, self.started[number] = self.started[number], None
        assert gather is not None, "keys are taken once"
        heads, dims = len(self.document.gathers[number]), self.document.row.dims
        both = _put_together(gather, self.document.sharding, (len(self.k), heads * sum(dims))).transpose(0, 1)
        k, v = both.split([heads * dim for dim in dims], dim=2)
        return k.unflatten(2, (heads, -1)), v.unflatten(2, (heads, -1))

    def finish(self) -> None:
        """Wait for gathers that nobody took: other ranks need what this one sends."""
        for gather in self.started:
            if gather is not None:
                gather.wait()

    def _some(self, number: int) -> tuple[Tensor, Tensor]:
        heads = self.document.gathers[number]
        return self.k[:, :, heads.start : heads.stop], self.v[:, :, heads.start : heads.stop]

    def _purpose(self, peers: Peers, number: int) -> str:
        """For errors: which keys for which queries."""
        sharding, heads = self.document.sharding, self.document.gathers[number]
        queries = [(sharding.rows_of_chunk(chunk), chunk) for chunk in sharding.chunks_of(peers.rank)]
        of = " and ".join(f"{rows.start} to {rows.stop - 1} (chunk {chunk})" for rows, chunk in queries)
        return f"gather keys 0 to {sharding.rows - 1} of KV heads {heads.start} to {heads.stop - 1} for its queries {of}"


def whole_keys(k: Tensor, v: Tensor) -> Callable[[OwnDocument], Keys]:
    """Of all documents that a rank works on, one behind the other."""
    return lambda own: Keys(own.document, k[:, own.keys], v[:, own.keys])
