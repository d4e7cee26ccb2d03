"""A call as one rank sees it: exchange heads, bring rows to those that work on them, gather keys, work through its units."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...attention.autograd import attention_backward, attention_forward
from ...attention.observers import SharedPart, observers, tell_observers
from ...call.call import Call, Gradients, Grads, Saved
from ...call.offsets import SequenceOffsets
from ...call.parts import backward_end_to_end, document_ends, end_to_end, in_rows
from ..hosts import ATTENTION, BACKWARD, agree
from ..peers import Peers
from .asked import Asked, Given, Part
from .mail import Keys, RankMail, whole_keys
from .moves import move, moves_of
from .passes import KeysOf, RowBackward, forward_of_rank, sum_of_sinks
from .shared_call import Lengths, SharedCall
from .ulysses import HeadExchange, inside_and_outside

Rows = tuple[Tensor, ...]  # dout, q, k, v, out
OfRows = tuple[Tensor, Tensor | None]  # LSE and, where it was used, its gradient


@dataclass(frozen=True)
class OfRank:
    """number: of the call, among those of the group."""

    part: Part
    exchange: HeadExchange
    outside: Peers
    everybody: Peers
    number: int

    @classmethod
    def agreed(cls, asked: Asked, peers: Peers, differentiable: bool, backward_of: int | None = None) -> OfRank:
        """The same on every rank, or an error on every rank. backward_of: the call that this was, where its backward is run."""
        ulysses = asked.sharing.ulysses
        if backward_of is None:
            part = agree(peers.hosts, ATTENTION, lambda: asked.part(peers.rank, differentiable))
            peers.hosts.keep(asked.given)
        else:
            part = agree(peers.hosts, BACKWARD, lambda: (asked.part(peers.rank, differentiable)[0], {}), backward_of)
        number = peers.hosts.number if backward_of is None else backward_of
        with peers.hosts.telling():
            inside, outside = inside_and_outside(peers, ulysses)  # may make groups, which needs all their ranks
        return cls(part, HeadExchange(inside, part.sharding, peers.rank - peers.rank % ulysses), outside, peers, number)

    def saved(self, ctx: Any) -> tuple[Tensor, ...]:
        """What autograd kept of this call, if all ranks are in its backward."""
        kept: tuple[Tensor, ...] = agree(self.everybody.hosts, BACKWARD, lambda: (ctx.saved_tensors, {}), self.number)
        return kept

    def forward(self, q: Tensor, k: Tensor, v: Tensor, given: Given) -> tuple[Tensor, Tensor]:
        """Output and LSE of this rank's rows."""
        call, rank = self.part.call, self.outside.rank
        given = given.of_heads(self.exchange.heads(q.shape[2]))
        q, k, v = map(self.exchange.to_heads, (q, k, v))
        if call is None:
            out, lse = _forward_alone((q, k, v), self.part, given)
        else:
            out, lse = _forward(call, self.outside, (q, k, v), given)
            if observers:
                part = SharedPart((call, rank), partial(call.described, rank))
                tell_observers(Call(q, k, v, self.part.options), part)
        return self.exchange.to_rows(out), self.exchange.to_rows(lse)

    def backward(self, rows: Rows, of_rows: OfRows, given: Given) -> Gradients:
        """dQ, dK and dV of this rank's rows. The sinks' gradient is that of all ranks on the first one, and zero on the others."""
        call, (lse, dlse) = self.part.call, of_rows
        given = given.of_heads(self.exchange.heads(rows[1].shape[2]))
        rows = tuple(map(self.exchange.to_heads, rows))
        if self.exchange.inside.count > 1 and dlse is None:  # a neighbour may have used its LSE where this rank has not
            dlse = torch.zeros_like(lse)
        lse, dlse = self.exchange.to_heads(lse), None if dlse is None else self.exchange.to_heads(dlse)
        if call is None:
            *gradients, dsinks = _backward_alone(rows, (lse, dlse), self.part, given)
        else:
            *gradients, dsinks = _backward(call, self.outside, rows, (lse, dlse), given)
        dq, dk, dv = map(self.exchange.to_rows, gradients)
        return Gradients(dq, dk, dv, None if dsinks is None else self._on_first_rank(dsinks))

    def _on_first_rank(self, dsinks: Tensor) -> Tensor:
        whole = self.exchange.inside.gather(dsinks.contiguous())
        return whole if self.exchange.inside.rank == 0 and self.outside.rank == 0 else torch.zeros_like(whole)


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


def _forward_alone(tensors: Rows, part: Part, given: Given) -> Saved:
    """Of a rank that has all rows of its heads: nothing is shared. Documents in the row are packed sequences."""
    call = _call_alone(tensors, part, given)
    if part.documents is None:
        return attention_forward(call)
    return in_rows(attention_forward(end_to_end(call, call.options, _offsets(part.documents, call.q))), call)


def _backward_alone(rows: Rows, of_rows: OfRows, part: Part, given: Given) -> Gradients:
    (dout, *tensors, out), (lse, dlse) = rows, of_rows
    call, saved, grads = _call_alone(tuple(tensors), part, given), Saved(out, lse), Grads(dout, dlse)
    if part.documents is None:
        return attention_backward(call, saved, grads)
    packed = end_to_end(call, call.options, _offsets(part.documents, call.q))
    return backward_end_to_end(attention_backward, packed, saved, grads)


def _call_alone(tensors: Rows, part: Part, given: Given) -> Call:
    q, k, v = tensors
    return Call(q, k, v, part.options, None, given.sinks, given.modifiers)


def _offsets(documents: Lengths, q: Tensor) -> SequenceOffsets:
    ends = torch.from_numpy(document_ends(documents, len(q))).to(q.device)
    return SequenceOffsets(ends, ends, max(documents), max(documents))
