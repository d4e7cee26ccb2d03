"""What ranks that share a sequence would do and send, without running it.

Messages, bytes and memory are counted from the plan that a rank runs. Memory is counted along the global sequence of units. A rank that
is ahead of the others may hold a few states more for a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...attention.explain import explains
from ...backends import import_backend, resolve_to_explain
from ...call.call import Call
from ...call.explain import Explanation, in_a_table, size_in_words
from ...call.options import AttentionOptions
from ...call.planning import describe_call, hash_of
from ...call.tensor_checks import check_flags
from ...scheduling.order import CONTEXT_PARALLEL_INVARIANT
from ...scheduling.problem import whole_number
from ...scheduling.ranks.sharding import Sharding
from ...scheduling.ranks.units import highest, most_states
from ..peers import Peers
from .asked import Asked, Part
from .attention import context_parallel_attention
from .moves import moves_of
from .shared_call import Lengths, OwnDocument, SharedCall, own_documents

NOTE = "of the backward, if a hop takes no time and a unit as long as its tasks; `dash-attn plan --ranks` knows machines and links"


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


def _costs_of_sharing(call: SharedCall, rank: int, sizes: RowBytes, sinks: bool) -> RankCosts:
    """Of a rank that shares the row. Without Ulysses, that is all."""
    moves, own, ranks = moves_of(call), own_documents(call, rank), range(call.sharding.ranks)
    there, back = moves.to_workers.sent(rank), moves.back.sent(rank)
    # A gather has one shape: every rank sends as many rows as the one with most.
    gathered = (len(ranks) - 1) * max(len(call.sharding.rows_of(one)) for one in ranks)
    keys = (gathered if call.is_one else moves.keys.sent(rank)) * sizes.keys
    tiles, sums = (moves.tiles.sent(rank), moves.sums.sent(rank)) if sinks else (0, 0)
    sent, state = [_states_sent(one) for one in own], call.backend.tile_size(*call.dims) * sizes.wide  # bytes of a KV tile
    backward = Sent(
        keys=keys,
        states=sum(states - finals for _, states, finals in sent) * state,
        final_states=sum(finals for *_, finals in sent) * state,
        sinks=(2 * call.tiles[0] * tiles + sums) * sizes.lse,  # two numbers of each row and query head, in whole tiles
        rows=there * sizes.there + back * sizes.back,
    )
    forward = Sent(keys=keys, rows=there * sizes.q + back * (sizes.out + sizes.lse))
    units = sum(len(one.document.shared.by_rank[one.rank]) for one in own)
    return RankCosts(units, sum(hops for hops, *_ in sent), forward, backward, _memory(call, rank, sizes, state, sinks))


def _states_sent(own: OwnDocument) -> tuple[int, int, int]:
    """How many times a rank sends states on, their tiles, and how many of them it sends from the last leg."""
    shared = own.document.shared
    hopping = [unit for unit in shared.by_rank[own.rank] if shared.hops(unit)]
    ending = [unit for unit in hopping if unit.after is not None and shared.units[unit.after].leg is None]
    return len(hopping), sum(map(shared.state_tiles, hopping)), sum(map(shared.state_tiles, ending))


def _memory(call: SharedCall, rank: int, sizes: RowBytes, state: int, sinks: bool) -> Memory:
    """States and sums are those of one document at a time. With sinks, sums are there until all documents are done."""
    moves, own = moves_of(call), own_documents(call, rank)
    states, sums = [most_states(one.document.shared)[one.rank] for one in own], [_sum_tiles(one) for one in own]
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


def _makespan(call: SharedCall) -> tuple[int, int]:
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


@dataclass(frozen=True)
class SharedExplanation:
    """`schedule`, `order_hash` and `guarantees` are those of one rank alone, whose bits all ranks have together; that they do is the last
    guarantee. `each` has a row per rank. `print` shows it as a table; `dataclasses.asdict` gives it to a log.
    """

    call: str = field(compare=False)  # of the whole sequence, in words
    backend: str
    ranks: int
    sharding: Sharding
    ulysses: int
    schedule: str
    order_hash: str
    guarantees: tuple[str, ...]
    each: tuple[RankCosts, ...]
    predicted_efficiency: float
    prediction_note: str = NOTE

    def __str__(self) -> str:
        low, high = min(self.sharding.lengths), max(self.sharding.lengths)
        rows, ulysses = f"{low}" if low == high else f"{low} to {high}", f", ulysses {self.ulysses}" if self.ulysses > 1 else ""
        table = {
            "call": self.call,
            "backend": self.backend,
            "ranks": f"{self.ranks}, {self.sharding.chunks} chunks of {rows} rows{ulysses}",
            "schedule": f"{self.schedule}, order {self.order_hash}",
            "guarantees": ", ".join(self.guarantees),
            "units": self._spread([rank.units for rank in self.each]),
            "hops": self._spread([rank.hops for rank in self.each]),
            "sent forward": self._largest([rank.forward for rank in self.each]),
            "sent backward": self._largest([rank.backward for rank in self.each]),
            "memory": self._largest([rank.memory for rank in self.each]),
            "predicted": f"efficiency {self.predicted_efficiency:.3f} {self.prediction_note}",
        }
        return in_a_table(table)

    def _spread(self, counts: list[int]) -> str:
        low, high = min(counts), max(counts)
        return f"{low} per rank" if low == high else f"{low} to {high} per rank"

    def _largest(self, found: Sequence[Sent | Memory]) -> str:
        """Of the rank that has most, and what it is made of."""
        most = max(found, key=lambda one: one.total)
        parts = [f"{name.replace('_', ' ')} {size_in_words(size)}" for name, size in most._asdict().items() if size]
        return f"{size_in_words(most.total)} per rank at most" + (f": {', '.join(parts)}" if parts else "")


@explains(context_parallel_attention)
def _explain(given: dict[str, Any], predict_time: bool) -> SharedExplanation:
    """No group is needed: `group` may be a number of ranks.

    q, k and v are the rows of one rank, as there; they may be on the meta device, with a named backend. It raises what the call would
    raise: so a plan that does not fit is found before anything is launched. return_lse changes nothing: neighbours
    that exchange heads also exchange the gradient of the LSE, be it used or not.
    """
    check_flags(return_lse=given["return_lse"])
    asked, group = Asked.by_name(given), given["group"]
    ranks = whole_number("the number of ranks", group) if isinstance(group, int) else Peers.of(group).count
    options, sharding = asked.checked(ranks, rank=None)
    name = resolve_to_explain(options.backend, asked.q.device)
    parts = [Part.of(asked, options, sharding, place, name) for place in range(asked.ulysses)]
    whole = [torch.empty(x.shape[0], sharding.rows, *x.shape[2:], dtype=x.dtype, device="meta") for x in asked[:3]]
    alone = _alone(name, whole, options, None if asked.cu_seqlens is None else parts[0].documents)
    calls = [part.call for part in parts]
    return SharedExplanation(
        call=alone.call,
        backend=name,
        ranks=ranks,
        sharding=sharding,
        ulysses=asked.ulysses,
        schedule=alone.schedule,
        order_hash=alone.order_hash,
        guarantees=(*alone.guarantees, CONTEXT_PARALLEL_INVARIANT),
        each=tuple(_costs(asked, sharding, calls)),
        predicted_efficiency=_efficiency([call for call in calls if call is not None]),
    )


def _alone(backend: str, whole: list[Tensor], options: AttentionOptions, documents: Lengths | None) -> Explanation:
    """What one rank would do. Documents that are not those of a mask are explained one by one."""
    explain, (q, k, v) = import_backend(backend).explain, whole
    call = Call(q, k, v, options)
    if documents is None:
        return explain(call, predict_time=False)
    parts = {length: Call(q[:1, :length], k[:1, :length], v[:1, :length], options) for length in set(documents)}
    of_length = {length: explain(part, predict_time=False) for length, part in parts.items()}
    each = [of_length[length] for length in documents]
    return replace(
        of_length[max(documents)],
        call=f"{describe_call(call)}, {len(documents)} documents",
        schedule=" and ".join(dict.fromkeys(one.schedule for one in each)),
        order_hash=hash_of(*(one.order_hash for one in each)),
    )


def _costs(asked: Asked, sharding: Sharding, calls: Sequence[SharedCall | None]) -> list[RankCosts]:
    """By rank: neighbours follow each other. calls: by place among neighbours that exchange heads, because each has heads of its own."""
    q, sinks, ulysses = asked.q, asked.given.sinks, len(calls)
    sizes, rows = RowBytes.of(*asked[:3], ulysses), [len(sharding.rows_of(rank)) for rank in range(sharding.ranks)]
    found = []
    for rank, own in enumerate(rows):
        group, place = divmod(rank, ulysses)
        call = calls[place]
        mine = RankCosts(0, 0, Sent(), Sent(), Memory()) if call is None else _costs_of_sharing(call, group, sizes, sinks is not None)
        # Of its own rows their heads, of their rows its own heads.
        there, back = own * (ulysses - 1), sum(rows[group * ulysses : (group + 1) * ulysses]) - own
        of_sinks = 0 if sinks is None else (ulysses - 1) * (q.shape[2] // ulysses) * sinks.element_size()
        forward = mine.forward._replace(heads=there * (sizes.q + sizes.keys) + back * (sizes.out + sizes.lse))
        backward = mine.backward._replace(
            heads=there * (sizes.there + sizes.keys) + back * sizes.back, sinks=mine.backward.sinks + of_sinks
        )
        found.append(replace(mine, forward=forward, backward=backward))
    return found


def _efficiency(calls: Sequence[SharedCall]) -> float:
    """All tasks, dealt evenly, against the slowest rank. Where only heads are exchanged, every rank has as many tasks."""
    runs = [_makespan(call) for call in calls]
    longest = max((makespan for _, makespan in runs), default=0)
    return sum(tasks for tasks, _ in runs) / (sum(call.sharding.ranks for call in calls) * longest) if longest else 1.0
