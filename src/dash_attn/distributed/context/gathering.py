"""Rows of all ranks, put together in the order of the sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...scheduling.ranks.sharding import Sharding
from ..peers import REACH_OTHERS, Peers, Pending
from .rows import rows_of
from .shared_call import Document, OwnDocument


def gather_rows(peers: Peers, sharding: Sharding, x: Tensor) -> Tensor:
    """(rows of a rank, ...) -> (all rows, ...)."""
    return _Gather(peers, sharding, x).rows()


class _Gather:
    """One that is on its way. Ranks with fewer rows send as many as the others, because a gather has one shape."""

    def __init__(self, peers: Peers, sharding: Sharding, x: Tensor, purpose: str = REACH_OTHERS) -> None:
        self.peers, self.sharding = peers, sharding
        most = max(len(sharding.rows_of(rank)) for rank in range(peers.count))
        padded = x if len(x) == most else torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])])
        self.shape = most, *x.shape[1:]
        self.pending: Pending = peers.start_gather(padded.contiguous().flatten(), purpose)

    def rows(self) -> Tensor:
        everything = self.pending.wait().view(self.peers.count, *self.shape)
        whole = everything.new_empty(self.sharding.rows, *self.shape[1:])
        for rank, part in enumerate(everything):
            mine = rows_of(self.sharding, rank, whole.device)
            whole[mine] = part[: len(mine)]
        return whole


class GatheredKeys:
    """The keys and values of all ranks, some KV heads at a time, where each has its own rows of one document."""

    def __init__(self, document: Document, peers: Peers, k: Tensor, v: Tensor) -> None:
        self.document, self.peers, self.k, self.v = document, peers, k, v
        self.started: list[_Gather | None] = []

    def start(self, number: int) -> None:
        while len(self.started) <= number:
            heads = self.document.gathers[len(self.started)]
            both = torch.cat([x[:, :, heads.start : heads.stop].flatten(2) for x in (self.k, self.v)], dim=2)
            self.started.append(_Gather(self.peers, self.document.sharding, both.transpose(0, 1), self._purpose(heads)))

    def get(self, number: int) -> tuple[Tensor, Tensor]:
        gather, self.started[number] = self.started[number], None
        assert gather is not None, "keys are taken once"
        both = gather.rows().transpose(0, 1)
        heads = len(self.document.gathers[number])
        k, v = both.split([heads * dim for dim in self.document.row.dims], dim=2)
        return k.unflatten(2, (heads, -1)), v.unflatten(2, (heads, -1))

    def _purpose(self, heads: range) -> str:
        """For errors: which keys for which queries."""
        chunks = self.document.sharding.chunks_of(self.peers.rank)
        queries = [self.document.sharding.rows_of_chunk(chunk) for chunk in chunks]
        of = " and ".join(f"{rows.start} to {rows.stop - 1} (chunk {chunk})" for chunk, rows in zip(chunks, queries, strict=True))
        return f"gather keys 0 to {self.document.sharding.rows - 1} of KV heads {heads.start} to {heads.stop - 1} for its queries {of}"

    def finish(self) -> None:
        for gather in self.started:
            if gather is not None:
                gather.pending.wait()


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
