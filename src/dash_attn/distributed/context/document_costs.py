"""What documents in a row cost a rank that shares it, counted from the plan that it runs (costs.py has those of one sequence)."""

from __future__ import annotations

from dataclasses import dataclass

from ...scheduling.ranks.units import most_states
from .costs import Memory, NumberBytes, RankCosts, Sent, state_bytes_sent, sum_bytes, tile_bytes
from .document_moves import Moves, moves_of
from .document_passes import own_documents
from .documents import SharedDocuments


@dataclass(frozen=True)
class _RowBytes:
    """Of one row of all sequences of the batch."""

    q: int
    out: int
    keys: int  # K and V
    lse: int
    tile: int  # of queries: what the gradient of sinks needs
    part: int  # of that gradient

    @classmethod
    def of(cls, row: SharedDocuments, bytes_of: NumberBytes) -> _RowBytes:
        heads, kv_heads, (dim, v_dim) = row.batch * row.kv_heads * row.group, row.batch * row.kv_heads, row.dims
        tile_q = row.documents[0].call.problem.tile_q
        return cls(
            heads * dim * bytes_of.tensor,
            heads * v_dim * bytes_of.tensor,
            kv_heads * (dim + v_dim) * bytes_of.tensor,
            heads * bytes_of.state,
            2 * heads * tile_q * bytes_of.state,
            heads * bytes_of.state,
        )

    @property
    def there(self) -> int:
        """What the backward sends to whoever works on a row: dout, q, out, LSE and its gradient."""
        return self.q + 2 * self.out + 2 * self.lse

    @property
    def back(self) -> int:
        """dQ, dK and dV."""
        return self.q + self.keys


def costs_of_documents(row: SharedDocuments, bytes_of: NumberBytes, sinks: bool) -> list[RankCosts]:
    """Of every rank that shares the row."""
    moves, sizes = moves_of(row), _RowBytes.of(row, bytes_of)
    return [_costs(row, rank, bytes_of, sizes, moves, sinks) for rank in range(row.sharding.ranks)]


def _costs(row: SharedDocuments, rank: int, bytes_of: NumberBytes, sizes: _RowBytes, moves: Moves, sinks: bool) -> RankCosts:
    own = own_documents(row, rank)
    there, back, keys = (movement.sent(rank) for movement in (moves.to_workers, moves.back, moves.keys))
    more = moves.tiles.sent(rank) * sizes.tile + moves.sums.sent(rank) * sizes.part if sinks else 0
    sent = [state_bytes_sent(one.document.call, one.rank, bytes_of) for one in own]
    backward = Sent(
        keys=keys * sizes.keys,
        states=sum(one.states for one in sent),
        final_states=sum(one.finals for one in sent),
        sinks=more,
        rows=there * sizes.there + back * sizes.back,
    )
    forward = Sent(keys=keys * sizes.keys, rows=there * sizes.q + back * (sizes.out + sizes.lse))
    units = sum(len(one.document.call.shared.by_rank[one.rank]) for one in own)
    return RankCosts(units, sum(one.hops for one in sent), forward, backward, _memory(row, rank, bytes_of, sizes, moves, sinks))


def _memory(row: SharedDocuments, rank: int, bytes_of: NumberBytes, sizes: _RowBytes, moves: Moves, sinks: bool) -> Memory:
    """States and sums are those of one document at a time. With sinks, sums are there until all documents are done."""
    own = own_documents(row, rank)
    states = [most_states(one.document.call.shared)[one.rank] * tile_bytes(one.document.call, bytes_of) for one in own]
    sums = [sum_bytes(one.document.call, one.rank, bytes_of) for one in own]
    return Memory(
        keys=len(moves.keys.want[rank]) * sizes.keys,
        states=max(states, default=0),
        sums=sum(sums) if sinks else max(sums, default=0),
        rows=len(moves.to_workers.want[rank]) * (sizes.there + sizes.back),
    )


def makespan_of(row: SharedDocuments) -> tuple[int, int]:
    """All tasks, and how long the slowest rank takes if a task takes one unit of time and nothing else any: as the chunk model has it."""
    free, tasks = [0] * row.sharding.ranks, 0
    for document in row.in_turn:
        shared, ends = document.call.shared, list[int]()
        for unit, waits in zip(shared.units, shared.waits, strict=True):
            rank, work = document.ranks[unit.rank], shared.tasks_of(unit)
            ends.append(max([free[rank], *(ends[other] for other in waits)]) + work)
            free[rank] = ends[-1]
            tasks += work
    return tasks, max(free)
