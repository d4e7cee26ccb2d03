"""Rows of all ranks, put together in the order of the sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

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


class GatheredKeys:
    """The keys and values of all ranks, where each has its own rows of one document. They come some KV heads at a time: one gather after
    the other, in the order of their numbers."""

    def __init__(self, document: Document, peers: Peers, k: Tensor, v: Tensor) -> None:
        self.document, self.peers, self.k, self.v = document, peers, k, v
        self.started: list[Pending | None] = []

    def start(self, number: int) -> None:
        """Let this gather, and those before it, begin. All ranks must do so sooner or later."""
        while len(self.started) <= number:
            heads = self.document.gathers[len(self.started)]
            both = torch.cat([x[:, :, heads.start : heads.stop].flatten(2) for x in (self.k, self.v)], dim=2)
            self.started.append(_start(self.peers, self.document.sharding, both.transpose(0, 1), self._purpose(heads)))

    def get(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a gather that was started."""
        gather, self.started[number] = self.started[number], None
        assert gather is not None, "keys are taken once"
        heads, dims = len(self.document.gathers[number]), self.document.row.dims
        both = _put_together(gather, self.document.sharding, (len(self.k), heads * sum(dims))).transpose(0, 1)
        k, v = both.split([heads * dim for dim in dims], dim=2)
        return k.unflatten(2, (heads, -1)), v.unflatten(2, (heads, -1))

    def _purpose(self, heads: range) -> str:
        """For errors: which keys for which queries."""
        chunks = self.document.sharding.chunks_of(self.peers.rank)
        queries = [self.document.sharding.rows_of_chunk(chunk) for chunk in chunks]
        of = " and ".join(f"{rows.start} to {rows.stop - 1} (chunk {chunk})" for chunk, rows in zip(chunks, queries, strict=True))
        return f"gather keys 0 to {self.document.sharding.rows - 1} of KV heads {heads.start} to {heads.stop - 1} for its queries {of}"

    def finish(self) -> None:
        """Wait for gathers that nobody took: other ranks need what this one sends."""
        for gather in self.started:
            if gather is not None:
                gather.wait()


class WholeKeys(NamedTuple):
    """All keys are here already."""

    document: Document
    k: Tensor
    v: Tensor

    def start(self, number: int) -> None:
        pass

    def get(self, number: int) -> tuple[Tensor, Tensor]:
        heads = self.document.gathers[number]
        return self.k[:, :, heads.start : heads.stop], self.v[:, :, heads.start : heads.stop]

    def finish(self) -> None:
        pass


def whole_keys(k: Tensor, v: Tensor) -> Callable[[OwnDocument], WholeKeys]:
    """Of all documents that a rank works on, one behind the other."""
    return lambda own: WholeKeys(own.document, k[:, own.keys], v[:, own.keys])
