"""A call as one rank sees it: exchange heads, gather keys, work through its units."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attention.observers import SharedPart, observers, tell_observers
from ...backends import resolve
from ...call.given_schedule import in_words
from ...call.modifiers import Modifiers, given_modifiers
from ...call.options import AttentionOptions, Choices, options_for
from ...call.planning import hash_of
from ...call.sums import sum_in_order
from ...call.tensor_checks import check_sinks, check_tensors
from ...masks import Mask
from ...masks.encoding import mask_to_json
from ...scheduling.ranks.sharding import CutTile, Sharding
from ..hosts import ATTENTION, BACKWARD
from ..late_values import NAMES
from ..peers import Peers
from .alone import backward_alone, forward_alone
from .document_ranks import backward_on_ranks, forward_on_ranks
from .documents import Offsets, SharedDocuments, documents_in, shared_call
from .gathering import GatheredKeys, gather_tiles
from .mail import RankMail
from .passes import BackwardPass, forward_pass
from .rows import by_head, by_row, sharding_of_rank
from .same_call import Facts, agree
from .shared_call import SharedCall
from .ulysses import HeadExchange, check_factor, inside_and_outside, outer_sharding

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]
Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # dout, q, k, v, out


class Sharing(NamedTuple):
    """How ranks share a call, as it was given."""

    sharding: str | Sharding
    ulysses: int
    cu_seqlens: Offsets | None


class Given(NamedTuple):
    """Tensors of a call that every rank has alike."""

    sinks: Tensor | None = None
    seeds: Tensor | None = None
    slopes: Tensor | None = None

    @property
    def modifiers(self) -> Modifiers | None:
        return None if self.seeds is None and self.slopes is None else Modifiers(self.seeds, self.slopes)

    def check(self, q: Tensor, dropout_p: float) -> None:
        check_sinks(self.sinks, q)
        given_modifiers(q, q.shape[0], dropout_p, self.seeds, self.slopes)

    @property
    def facts(self) -> Facts:
        return {name: _in_words(x) for name, x in zip(NAMES, self, strict=True)}


def _in_words(x: Tensor | None) -> str:
    """On a GPU the host does not look at values now (late_values.py)."""
    if x is None:
        return "none"
    return f"{x.tolist()} ({x.dtype})" if x.device.type == "cpu" else f"{tuple(x.shape)} ({x.dtype})"


class Asked(NamedTuple):
    """What a rank was asked for."""

    q: Tensor
    k: Tensor
    v: Tensor
    given: Given
    choices: Choices
    peers: Peers
    sharing: Sharing
    differentiable: bool

    def part(self) -> tuple[_Part, Facts]:
        """And what must be the same on every rank."""
        q, k, v = self[:3]
        check_tensors(q, k, v)
        self.given.check(q, self.choices.dropout_p)
        options = options_for(self.choices, q.shape[-1])
        part = _Part.of(q, k, v, options, self.peers, self.sharing)
        shared = {"sharding": part.sharding, "ulysses": self.sharing.ulysses, "cu_seqlens": part.documents}
        code = None if part.call is None else part.call.of_backend.machine_code()
        more = {"whether gradients are needed": self.differentiable, "the machine code": code}
        return part, _facts(q, k, v, options) | shared | self.given.facts | more


@dataclass(frozen=True)
class _Part:
    """What a rank finds out by itself, before it knows that the others agree."""

    options: AttentionOptions
    call: SharedCall | SharedDocuments | None
    documents: tuple[int, ...] | None
    sharding: Sharding

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, peers: Peers, sharing: Sharing) -> _Part:
        """Raises where this rank's tensors do not fit. Sends no message."""
        sharding, ulysses = sharding_of_rank(sharing.sharding, q.shape[1], peers.count), sharing.ulysses
        rows = len(sharding.rows_of(peers.rank))
        if not q.shape[1] == k.shape[1] == rows:
            raise ValueError(
                f"rank {peers.rank} has {rows} of the {sharding.rows} rows, queries and keys alike; got {q.shape[1]} queries and"
                f" {k.shape[1]} keys"
            )
        check_factor(ulysses, peers.count, k.shape[2])
        place = peers.rank % ulysses
        own = replace(options, head_offset=options.head_offset + place * (k.shape[2] // ulysses))
        alone, documents = documents_in(own, sharing.cu_seqlens, sharding.rows)
        outer = outer_sharding(sharding, ulysses)
        if outer.ranks == 1 and sharing.cu_seqlens is None:
            documents = None  # backends know masks of documents
        own = own if documents is None else alone
        try:
            call = shared_call(q, k, v, own, documents, outer, ulysses) if outer.ranks > 1 else None
        except CutTile as error:  # it speaks of outer chunks: with Ulysses, as many of the rank's own are one
            raise ValueError(f"{error.words}. {sharding.that_fit(error.unit // math.gcd(error.unit, ulysses))}") from error
        return cls(own, call, documents, sharding)


@dataclass(frozen=True)
class OfRank:
    """options: those of the rank's own heads. call: what the ranks outside share; None where there is no other. documents: lengths of
    those in the row, if it has any. number: of the call, among those of the group."""

    options: AttentionOptions
    call: SharedCall | SharedDocuments | None
    documents: tuple[int, ...] | None
    exchange: HeadExchange
    outside: Peers
    everybody: Peers
    number: int

    @classmethod
    def agreed(cls, asked: Asked, backward_of: int | None = None) -> OfRank:
        """The same on every rank, or an error on every rank. backward_of: the call that this was, where its backward is run."""
        peers, ulysses = asked.peers, asked.sharing.ulysses
        if backward_of is None:
            part = agree(peers, ATTENTION, asked.part)
            peers.keep(asked.given)
        else:
            part = agree(peers, BACKWARD, lambda: (asked.part()[0], {}), backward_of)
        number = peers.begun if backward_of is None else backward_of
        with peers.telling():
            inside, outside = inside_and_outside(peers, ulysses)  # may make groups, which needs all their ranks
        exchange = HeadExchange(inside, part.sharding, peers.rank - peers.rank % ulysses)
        return cls(part.options, part.call, part.documents, exchange, outside, peers, number)

    def saved(self, ctx: Any) -> tuple[Tensor, ...]:
        """What autograd kept of this call, if all ranks are in its backward."""
        kept: tuple[Tensor, ...] = agree(self.everybody, BACKWARD, lambda: (ctx.saved_tensors, {}), self.number)
        return kept

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, modifiers: Modifiers | None = None) -> tuple[Tensor, Tensor]:
        """Output and LSE of this rank's rows."""
        q, k, v = map(self.exchange.to_heads, (q, k, v))
        own_sinks, own_modifiers = self._own(sinks), self._own_modifiers(modifiers)
        if self.call is None:
            out, lse = forward_alone((q, k, v), self.options, self.documents, own_sinks, own_modifiers)
        elif isinstance(self.call, SharedDocuments):
            out, lse = forward_on_ranks(self.call, self.outside, (q, k, v), own_sinks, own_modifiers)
        else:
            keys = GatheredKeys(self.call, self.outside, k, v)
            out, lse = forward_pass(self.call, self.outside.rank, q, keys, own_sinks, own_modifiers)
        if observers and self.call is not None:
            part = SharedPart((self.call, self.outside.rank), partial(self.call.described, self.outside.rank))
            tell_observers(q, k, v, self.options, shared=part)
        return self.exchange.to_rows(out), by_head(self.exchange.to_rows(by_row(lse)))

    def backward(self, rows: Rows, lse: Tensor, sinks: Tensor | None, dlse: Tensor | None, modifiers: Modifiers | None = None) -> Gradients:
        """dQ, dK and dV of this rank's rows. The sinks' gradient is that of all ranks on the first one, and zero on the others."""
        dout, q, k, v, out = map(self.exchange.to_heads, rows)
        if self.exchange.inside.count > 1 and dlse is None:  # a neighbour may have used its LSE where this rank has not
            dlse = torch.zeros_like(lse)
        dlse = None if dlse is None else by_head(self.exchange.to_heads(by_row(dlse)))
        lse = by_head(self.exchange.to_heads(by_row(lse)))
        own_sinks, own_modifiers = self._own(sinks), self._own_modifiers(modifiers)
        tensors = dout, q, k, v, out
        if self.call is None:
            *gradients, dsinks = backward_alone(tensors, (lse, dlse), self.options, self.documents, own_sinks, own_modifiers)
        elif isinstance(self.call, SharedDocuments):
            *gradients, dsinks = backward_on_ranks(self.call, self.outside, tensors, (lse, dlse), own_sinks, own_modifiers)
        else:
            *gradients, dsinks = self._share(self.call, tensors, lse, own_sinks, dlse, own_modifiers)
        dq, dk, dv = map(self.exchange.to_rows, gradients)
        return dq, dk, dv, None if dsinks is None else self._on_first_rank(dsinks)

    def _share(
        self,
        call: SharedCall,
        rows: Rows,
        lse: Tensor,
        sinks: Tensor | None,
        dlse: Tensor | None,
        modifiers: Modifiers | None,
    ) -> Gradients:
        dout, q, k, v, out = rows
        keys = GatheredKeys(call, self.outside, k, v)
        mail = RankMail(self.outside, call.shared, call.of_backend.tile_size(*call.dims), lse)
        work = BackwardPass(call, self.outside.rank, (dout, q, out), (lse, dlse), keys, mail, modifiers)
        for unit in work.units:
            work.step(unit)
        dq, dk, dv = work.finish()
        mail.finish()
        keys.finish()
        if sinks is None:
            return dq, dk, dv, None
        # A sum over all rows in a fixed order: every rank gathers what it needs of all rows.
        everybody = gather_tiles(call, self.outside, work.backward.rows_of_sinks)
        return dq, dk, dv, sum_in_order(work.backward.sink_gradients(everybody, sinks)).to(sinks.dtype)

    def _own(self, sinks: Tensor | None) -> Tensor | None:
        return None if sinks is None else sinks[self.exchange.heads(len(sinks))]

    def _own_modifiers(self, modifiers: Modifiers | None) -> Modifiers | None:
        """The options of the rank's own heads know where these begin."""
        if modifiers is None or modifiers.slopes is None:
            return modifiers
        return modifiers._replace(slopes=modifiers.slopes[..., self.exchange.heads(modifiers.slopes.shape[-1])])

    def _on_first_rank(self, dsinks: Tensor) -> Tensor:
        whole = self.exchange.inside.gather(dsinks.contiguous())
        return whole if self.exchange.inside.rank == 0 and self.outside.rank == 0 else torch.zeros_like(whole)


def _facts(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Facts:
    """What must be the same on every rank."""
    facts: Facts = {name: getattr(options, name) for name in ("softcap", "accumulation", "head_offset", "dropout_p")}
    facts["softmax_scale"] = options.scale
    facts["backend"] = resolve(options.backend, q.device)
    facts["mask"], facts["schedule"] = _mask_in_words(options.mask), _schedule_in_words(options.schedule)
    facts |= {"the batch size": q.shape[0], "the numbers of heads": (q.shape[2], k.shape[2]), "the head dims": (q.shape[3], v.shape[3])}
    return facts | {"the dtype": q.dtype}


@lru_cache(maxsize=64)
def _mask_in_words(mask: Mask) -> str:
    """With a hash, because the words leave out the blocks of a mask."""
    return f"{mask} ({hash_of(json.dumps(mask_to_json(mask)))})"


@lru_cache(maxsize=64)
def _schedule_in_words(schedule: str) -> str:
    return f"{in_words(schedule)} ({hash_of(schedule)})"
