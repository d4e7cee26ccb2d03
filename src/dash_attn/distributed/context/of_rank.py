"""A call as one rank sees it: exchange heads, bring rows to those that work on them, gather keys, work through its units.

A rank takes one document of the row after the other, in one order for all. What travels goes through `Keys` and `Mail`, which also serve
one process that plays all ranks.

Ranks cannot wait in a circle. All units of all documents have one sequence, that of the first document, then that of the next. Inside
a document each unit comes after those that it waits for, and no unit waits for one of another document. What ranks exchange besides
states and gathers of keys, they exchange before the first unit or behind the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...attention.autograd import attention_backward, attention_forward
from ...attention.observers import SharedPart, observers, tell_observers
from ...backends import RankBackward
from ...call.call import Call, Given, Gradients, Grads, Modifiers, Saved, sum_in_order
from ...call.parts import backward_end_to_end, end_to_end, in_rows, offsets_of_documents
from ...scheduling.ranks.units import Unit
from ..hosts import ATTENTION, BACKWARD, agree
from ..peers import Peers
from .asked import Asked, Part
from .mail import Keys, Mailbox, RankMail, whole_keys
from .moves import move, moves_of
from .shared_call import OwnDocument, SharedCall, own_documents
from .ulysses import HeadExchange, inside_and_outside

KeysOf = Callable[[OwnDocument], Keys]
Mail = RankMail | Mailbox
Rows = tuple[Tensor, ...]  # dout, q, k, v, out; some of them
OfRows = tuple[Tensor, Tensor | None]  # LSE and, where it was used, its gradient


@dataclass(frozen=True)
class OfRank:
    """What runs the passes of a call. number: of the call, among those of the group."""

    alone = False
    part: Part
    exchange: HeadExchange
    outside: Peers
    everybody: Peers
    number: int

    @classmethod
    def agreed(cls, asked: Asked, peers: Peers, differentiable: bool, backward_of: int | None = None) -> OfRank:
        """The same on every rank, or an error on every rank. backward_of: the call that this was, where its backward is run."""
        if backward_of is None:
            part = agree(peers.hosts, ATTENTION, lambda: asked.part(peers.count, peers.rank, differentiable))
            peers.hosts.keep(asked.given)
        else:
            part = agree(peers.hosts, BACKWARD, lambda: (asked.part(peers.count, peers.rank, differentiable)[0], {}), backward_of)
        number = peers.hosts.number if backward_of is None else backward_of
        with peers.hosts.telling():
            inside, outside = inside_and_outside(peers, asked.ulysses)  # may make groups, which needs all their ranks
        return cls(part, HeadExchange(inside, part.sharding, peers.rank - peers.rank % asked.ulysses), outside, peers, number)

    def saved(self, ctx: Any) -> tuple[Tensor, ...]:
        """What autograd kept of this call, if all ranks are in its backward."""
        kept: tuple[Tensor, ...] = agree(self.everybody.hosts, BACKWARD, lambda: (ctx.saved_tensors, {}), self.number)
        return kept

    def forward(self, call: Call) -> Saved:
        """Output and LSE of this rank's rows."""
        shared, rank = self.part.call, self.outside.rank
        with self.everybody.hosts.telling():
            given = _given(call).of_heads(self.exchange.heads(call.q.shape[2]))
            q, k, v = map(self.exchange.to_heads, call.tensors)
            if shared is None:
                dense, packed = _alone((q, k, v), self.part, given)
                out, lse = attention_forward(dense) if packed is None else in_rows(attention_forward(packed), dense)
            else:
                out, lse = _forward(shared, self.outside, (q, k, v), given)
                if observers:
                    part = SharedPart((shared, rank), partial(shared.described, rank))
                    tell_observers(Call(q, k, v, self.part.options), part)
            return Saved(self.exchange.to_rows(out), self.exchange.to_rows(lse))

    def backward(self, call: Call, saved: Saved, grads: Grads) -> Gradients:
        """dQ, dK and dV of this rank's rows. The sinks' gradient is that of all ranks on the first one, and zero on the others."""
        shared, dlse = self.part.call, grads.lse
        with self.everybody.hosts.telling():
            given = _given(call).of_heads(self.exchange.heads(call.q.shape[2]))
            rows = tuple(map(self.exchange.to_heads, (grads.out, *call.tensors, saved.out)))
            if self.exchange.inside.count > 1 and dlse is None:  # a neighbour may have used its LSE where this rank has not
                dlse = torch.zeros_like(saved.lse)
            lse, dlse = self.exchange.to_heads(saved.lse), None if dlse is None else self.exchange.to_heads(dlse)
            if shared is None:
                dense, packed = _alone(rows[1:4], self.part, given)
                alone = attention_backward if packed is None else partial(backward_end_to_end, attention_backward)
                *gradients, dsinks = alone(packed or dense, Saved(rows[4], lse), Grads(rows[0], dlse))
            else:
                *gradients, dsinks = _backward(shared, self.outside, rows, (lse, dlse), given)
            dq, dk, dv = map(self.exchange.to_rows, gradients)
            if dsinks is not None:
                whole = self.exchange.inside.gather(dsinks.contiguous())
                dsinks = whole if self.everybody.rank == 0 else torch.zeros_like(whole)
            return Gradients(dq, dk, dv, dsinks)


def _given(call: Call) -> Given:
    return Given(call.sinks, *(call.modifiers or Modifiers())[:2])


def _forward(call: SharedCall, peers: Peers, tensors: Rows, given: Given) -> tuple[Tensor, Tensor]:
    """Output and LSE of this rank's own rows. tensors: its q, k and v."""
    (q, k, v), moves = tensors, moves_of(call)
    (q,) = move(moves.to_workers, peers, [q])
    out, lse = forward_of_rank(call, peers.rank, q, _keys_of(call, peers, k, v), given)
    out, lse = move(moves.back, peers, [out], [lse])
    return out, lse


def _backward(call: SharedCall, peers: Peers, rows: Rows, of_rows: OfRows, given: Given) -> Gradients:
    """dQ, dK and dV of this rank's own rows. The sinks' gradient is complete on the first rank, and zero on the others."""
    (dout, q, k, v, out), (lse, dlse), moves = rows, of_rows, moves_of(call)
    if dlse is None and not moves.to_workers.still:  # another rank may have used its own
        dlse = torch.zeros_like(lse)
    dout, q, out, lse, dlse = move(moves.to_workers, peers, [dout, q, out], [lse, dlse])
    work = RowBackward(call, peers.rank, (dout, q, out), (lse, dlse), _keys_of(call, peers, k, v), given)
    mail = RankMail(peers, call, lse)
    work.run(mail)
    mail.finish()
    dq, dk, dv = move(moves.back, peers, work.gradients())
    if given.sinks is None:
        return Gradients(dq, dk, dv)
    (tiles,) = move(moves.tiles, peers, [work.tiles_of_sinks()])
    (sums,) = move(moves.sums, peers, [work.sums_of_sinks(tiles)])
    return Gradients(dq, dk, dv, sum_of_sinks(sums, given.sinks))


def _keys_of(call: SharedCall, peers: Peers, k: Tensor, v: Tensor) -> KeysOf:
    """Of one document, gathers come while ranks work. Keys of several come before: ranks do not take them together."""
    if call.is_one:
        return lambda own: Keys(own.document, k, v, peers)
    k, v = move(moves_of(call).keys, peers, [k, v])
    return whole_keys(k, v)


def _alone(tensors: Sequence[Tensor], part: Part, given: Given) -> tuple[Call, Call | None]:
    """The call of a rank that has all rows of its heads: nothing is shared. And that of packed sequences, where there are documents in
    the row."""
    q, k, v = tensors
    dense = Call(q, k, v, part.options, None, given.sinks, given.modifiers)
    if part.documents is None:
        return dense, None
    return dense, end_to_end(dense, part.options, offsets_of_documents(part.documents, len(q), q.device))


def forward_of_rank(call: SharedCall, rank: int, q: Tensor, keys_of: KeysOf, given: Given) -> tuple[Tensor, Tensor]:
    """Output and LSE of the queries that a rank works on."""
    out = q.new_empty(*q.shape[:3], call.dims[1])
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.promote_types(q.dtype, torch.float32))
    for own in own_documents(call, rank):
        _forward_of_document(own, q[:, own.rows], keys_of(own), given, (out[:, own.rows], lse[:, :, own.rows]))
    return out, lse


def _forward_of_document(own: OwnDocument, q: Tensor, keys: Keys, given: Given, into: tuple[Tensor, Tensor]) -> None:
    """While some KV heads are worked on, the keys of the next are on their way."""
    (out, lse), document, call = into, own.document, own.document.row
    for number, kv_heads in enumerate(document.gathers):
        keys.start(min(number + 1, len(document.gathers) - 1))
        heads = slice(kv_heads.start * call.group, kv_heads.stop * call.group)
        sinks = None if given.sinks is None else given.sinks[heads]
        modifiers = None if given.modifiers is None else given.modifiers.of_heads(heads)
        some = Call(q[:, :, heads], *keys.get(number), call.options, None, sinks, modifiers)
        out[:, :, heads], lse[:, heads] = call.backend.forward(some, document.problem, document.sharding, own.rank)


class BackwardPass:
    """The backward of a rank's share of a document: a `step` for each of its units, then `finish`."""

    def __init__(self, row: RowBackward, own: OwnDocument, mail: Mail) -> None:
        document, call, modifiers = own.document, own.document.row, row.given.modifiers
        self.document, self.shared, self.keys, self.mail = document, document.shared, row.keys_of(own), mail
        more = {} if modifiers is None else {"modifiers": modifiers}
        rows, of_rows = [x[:, own.rows] for x in row.rows], [None if x is None else x[:, :, own.rows] for x in row.of_rows]
        arguments = document.plan, document.shared, own.rank, call.options, tuple(rows), tuple(of_rows)
        self.backward: RankBackward = call.backend.RankBackward(*arguments, **more)
        self.units = self.shared.by_rank[own.rank]
        self._states: dict[int, Tensor] = {}  # of units whose next leg is here, too
        self._there: set[int] = set()  # gathers whose keys have come and are still needed
        self._last_use = {number: unit for unit, number in document.uses(self.units)}

    def step(self, unit: Unit) -> None:
        """The rank's next unit."""
        self._take_keys(unit)
        if unit.before is None:
            state = self.backward.new_state(unit)
        else:
            state = self._states.pop(unit.before) if unit.before in self._states else self.mail.receive(self.document, unit)
        self.backward.run(unit, state)
        if self.shared.hops(unit):
            self.mail.send(self.document, unit, state)
        elif unit.after is not None:
            self._states[unit.number] = state
        self._drop_keys(unit)

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK and dV of the rank's rows."""
        self.keys.start(len(self.document.gathers) - 1)  # others may need what this rank did not
        self.keys.finish()
        return self.backward.finish()

    def _take_keys(self, unit: Unit) -> None:
        self.keys.start(max(number for number, start in enumerate(self.document.gather_starts) if start <= unit.number))
        for number in self.document.gathers_of(unit):
            if number not in self._there:
                self.backward.take_keys(*self.keys.get(number), self.document.gathers[number].start)
                self._there.add(number)

    def _drop_keys(self, unit: Unit) -> None:
        for number in [number for number in self._there if self._last_use[number] == unit.number]:
            kv_heads = self.document.gathers[number]
            self.backward.drop_keys(kv_heads.start, len(kv_heads))
            self._there.remove(number)


class RowBackward:
    """The backward of a rank: each of its documents in turn, a BackwardPass and the `end` of it."""

    def __init__(self, call: SharedCall, rank: int, rows: Rows, of_rows: OfRows, keys_of: KeysOf, given: Given) -> None:
        """rows: dout, q and out of the rows that the rank works on; of_rows: their LSE and, where it was used, its gradient."""
        self.call, self.rows, self.of_rows, self.keys_of, self.given = call, rows, of_rows, keys_of, given
        self.own = own_documents(call, rank)
        self._found: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # by document: dQ, dK and dV
        self._kept: dict[int, RankBackward] = {}  # by document: the gradient of sinks needs them behind their units

    def end(self, own: OwnDocument, work: BackwardPass) -> None:
        self._found[own.document.number] = work.finish()
        if self.given.sinks is not None:
            self._kept[own.document.number] = work.backward

    def run(self, mail: Mail) -> None:
        for own in sorted(self.own, key=lambda own: own.document.turn):
            work = BackwardPass(self, own, mail)
            for unit in work.units:
                work.step(unit)
            self.end(own, work)

    def gradients(self) -> tuple[Tensor, ...]:
        """dQ, dK and dV of the rows that the rank works on."""
        found = [self._found[own.document.number] for own in self.own]
        if len(found) == 1:
            return found[0]
        q, (dim, v_dim) = self.rows[1], self.call.dims
        none = [q.new_empty(len(q), 0, *shape) for shape in ((q.shape[2], dim), (self.call.kv_heads, dim), (self.call.kv_heads, v_dim))]
        return tuple(torch.cat(parts, dim=1) for parts in zip(none, *found, strict=True))

    def tiles_of_sinks(self) -> Tensor:
        """What the gradient of sinks needs of all tiles that the rank works on: (1, tiles, ...)."""
        batch, heads, _ = self.of_rows[0].shape
        like = self.of_rows[0].new_empty(0, 2, batch, heads, self.call.tiles[0])
        return torch.cat([like, *(self._kept[own.document.number].rows_of_sinks.movedim(-2, 0) for own in self.own)])[None]

    def sums_of_sinks(self, tiles: Tensor) -> Tensor:
        """(1, documents, batch, query heads): of documents whose first rank this is, from all their tiles."""
        sinks, firsts = self.given.sinks, [own.document for own in self.own if own.rank == 0]
        assert sinks is not None
        parts = tiles[0].split([document.problem.q_tiles for document in firsts]) if firsts else ()
        found = [sinks.new_empty(0, self.call.batch, len(sinks), dtype=self.of_rows[0].dtype)]
        for document, part in zip(firsts, parts, strict=True):
            found.append(self._kept[document.number].sink_gradients(part.movedim(0, -2).contiguous(), sinks)[None])
        return torch.cat(found)[None]


def sum_of_sinks(sums: Tensor, sinks: Tensor) -> Tensor:
    """From those of all documents: sequence by sequence, document by document, as packed sequences are summed. Zero without any."""
    parts = sums[0].transpose(0, 1).flatten(0, 1)  # (sequences x documents, query heads)
    return sum_in_order(parts).to(sinks.dtype) if len(parts) else torch.zeros_like(sinks)
