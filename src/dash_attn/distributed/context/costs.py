"""What sharing a row costs a rank: messages, bytes and memory, counted from the plan that it runs.

Memory is counted along the global sequence of units. A rank that is ahead of the others may hold a few states more for a while.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...scheduling.ranks.units import highest, most_states
from .moves import moves_of
from .shared_call import OwnDocument, SharedCall, own_documents


class Sent(NamedTuple):
    """Bytes that a rank sends in one pass. A copy for each rank that gets it counts."""

    heads: int = 0  # exchanged for rows, with Ulysses
    keys: int = 0  # gathers of K and V
    states: int = 0  # float32 dK and dV, from leg to leg
    final_states: int = 0  # the same, from the last leg to the rank of the keys
    sinks: int = 0  # what their gradient needs of each row, and that of a rank's heads
    rows: int = 0  # of documents: to the rank that works on them, and their results back

    @property
    def total(self) -> int:
        return sum(self)


class Memory(NamedTuple):
    """Bytes that a rank needs in the backward beyond its own rows of inputs, outputs and gradients."""

    keys: int = 0  # gathered K and V, one copy: of the KV heads that are worked on, and of the next
    states: int = 0  # that wait for their unit or are worked on
    sums: int = 0  # float32 dK and dV of the rank's own keys
    rows: int = 0  # of documents: copies of those that the rank works on, and their gradients

    @property
    def total(self) -> int:
        return sum(self)


@dataclass(frozen=True)
class RankCosts:
    """Of one rank. hops: how many times it sends states on."""

    units: int
    hops: int
    forward: Sent
    backward: Sent
    memory: Memory


class RowBytes(NamedTuple):
    """Of one row of all sequences of the batch, with the heads of one rank."""

    q: int
    out: int
    keys: int  # K and V
    lse: int  # as much as of a part of the gradient of sinks
    wide: int  # of one number in LSE, states and sums

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, heads_of: int) -> RowBytes:
        """heads_of: among how many ranks the heads of these tensors are dealt."""
        dims, number, wide = q.shape[3] + v.shape[3], q.element_size(), torch.promote_types(q.dtype, torch.float32).itemsize
        heads, kv_heads = (len(q) * x.shape[2] // heads_of for x in (q, k))
        return cls(heads * q.shape[3] * number, heads * v.shape[3] * number, kv_heads * dims * number, heads * wide, wide)

    @property
    def there(self) -> int:
        """What the backward sends to whoever works on a row: dout, q, out, LSE and its gradient."""
        return self.q + 2 * self.out + 2 * self.lse

    @property
    def back(self) -> int:
        """dQ, dK and dV."""
        return self.q + self.keys


def costs_of_sharing(call: SharedCall, sizes: RowBytes, sinks: bool) -> list[RankCosts]:
    """Of every rank that shares the row. Without Ulysses, that is all."""
    return [_costs(call, rank, sizes, sinks) for rank in range(call.sharding.ranks)]


def _costs(call: SharedCall, rank: int, sizes: RowBytes, sinks: bool) -> RankCosts:
    moves, own = moves_of(call), own_documents(call, rank)
    there, back, keys = moves.to_workers.sent(rank), moves.back.sent(rank), _keys_sent(call, rank) * sizes.keys
    tiles, sums = (moves.tiles.sent(rank), moves.sums.sent(rank)) if sinks else (0, 0)
    sent, state = [_states_sent(one) for one in own], _state_bytes(call, sizes)
    backward = Sent(
        keys=keys,
        states=sum(states - finals for _, states, finals in sent) * state,
        final_states=sum(finals for *_, finals in sent) * state,
        sinks=(2 * call.tiles[0] * tiles + sums) * sizes.lse,  # two numbers of each row and query head, in whole tiles
        rows=there * sizes.there + back * sizes.back,
    )
    forward = Sent(keys=keys, rows=there * sizes.q + back * (sizes.out + sizes.lse))
    units = sum(len(one.document.shared.by_rank[one.rank]) for one in own)
    return RankCosts(units, sum(hops for hops, *_ in sent), forward, backward, _memory(call, rank, sizes, sinks))


def _state_bytes(call: SharedCall, sizes: RowBytes) -> int:
    """Of a KV tile."""
    return call.backend.tile_size(*call.dims) * sizes.wide


def _keys_sent(call: SharedCall, rank: int) -> int:
    """Rows. A gather has one shape: every rank sends as many as the one with most."""
    ranks = range(call.sharding.ranks)
    return (len(ranks) - 1) * max(len(call.sharding.rows_of(one)) for one in ranks) if call.is_one else moves_of(call).keys.sent(rank)


def _states_sent(own: OwnDocument) -> tuple[int, int, int]:
    """How many times a rank sends states on, their tiles, and how many of them it sends from the last leg."""
    shared = own.document.shared
    hopping = [unit for unit in shared.by_rank[own.rank] if shared.hops(unit)]
    ending = [unit for unit in hopping if unit.after is not None and shared.units[unit.after].leg is None]
    return len(hopping), sum(map(shared.state_tiles, hopping)), sum(map(shared.state_tiles, ending))


def _memory(call: SharedCall, rank: int, sizes: RowBytes, sinks: bool) -> Memory:
    """States and sums are those of one document at a time. With sinks, sums are there until all documents are done."""
    moves, own = moves_of(call), own_documents(call, rank)
    states, state = [most_states(one.document.shared)[one.rank] for one in own], _state_bytes(call, sizes)
    sums = [_sum_tiles(one) for one in own]
    return Memory(
        keys=_most_keys(own[0]) * sizes.keys // call.kv_heads if call.is_one else len(moves.keys.want[rank]) * sizes.keys,
        states=max(states, default=0) * state,
        sums=(sum(sums) if sinks else max(sums, default=0)) * state,
        rows=0 if moves.to_workers.still else len(moves.to_workers.want[rank]) * (sizes.there + sizes.back),
    )


def _sum_tiles(own: OwnDocument) -> int:
    """Float32 tiles of dK and dV of the rank's own keys."""
    document = own.document
    chunks = document.sharding.chunk_of_tiles(document.problem.tile_kv)
    tiles = np.count_nonzero(np.array(document.sharding.owners)[chunks] == own.rank)
    return document.plan.sums * document.row.batch * document.row.kv_heads * int(tiles)


def _most_keys(own: OwnDocument) -> int:
    """Rows of a KV head. A gather is there from its start to its last use by this rank."""
    document = own.document
    last_use = {number: unit for unit, number in document.uses(document.shared.by_rank[own.rank])}
    sizes = {number: document.sharding.rows * len(document.gathers[number]) for number in last_use}
    starts = document.gather_starts
    return highest(event for number, size in sizes.items() for event in ((starts[number], size), (last_use[number] + 1, -size)))


def makespan_of(call: SharedCall) -> tuple[int, int]:
    """All tasks, and how long the slowest rank takes if a task takes one unit of time and nothing else any: as the chunk model has it."""
    free, tasks = [0] * call.sharding.ranks, 0
    for document in call.in_turn:
        shared, ends = document.shared, list[int]()
        for unit, waits in zip(shared.units, shared.waits, strict=True):
            rank, work = document.ranks[unit.rank], shared.tasks_of(unit)
            ends.append(max([free[rank], *(ends[other] for other in waits)]) + work)
            free[rank] = ends[-1]
            tasks += work
    return tasks, max(free)
