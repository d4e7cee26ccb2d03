"""A call as one rank sees it: exchange heads, gather keys, work through its units."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

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
from ...scheduling.devices.sharding import CutTile, Sharding
from ...scheduling.mask_json import mask_to_json
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
        """On a GPU the host does not look at values."""
        seeds = self.seeds.tolist() if self.seeds is not None and self.seeds.device.type == "cpu" else self.seeds is not None
        sinks, slopes = ("none" if x is None else str(x.dtype) for x in (self.sinks, self.slopes))
        return {"the sinks": sinks, "alibi_slopes": slopes, "dropout_seed": seeds}


@dataclass(frozen=True)
class _Part:
    """What a rank finds out by itself, before it knows that the others agree."""

    options: AttentionOptions
    call: SharedCall | SharedDocuments | None
    documents: tuple[int, ...] | None
    sharding: Sharding
    facts: Facts

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, peers: Peers, sharing: Sharing, more: Facts) -> _Part:
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
        if outer.devices == 1 and sharing.cu_seqlens is None:
            documents = None  # backends know masks of documents
        own = own if documents is None else alone
        try:
            call = shared_call(q, k, v, own, documents, outer, ulysses) if outer.devices > 1 else None
        except CutTile as error:  # it speaks of outer chunks: with Ulysses, as many of the rank's own are one
            raise ValueError(f"{error.words}. {sharding.that_fit(error.unit // math.gcd(error.unit, ulysses))}") from error
        facts = _facts(q, k, v, options) | {"sharding": sharding, "ulysses": ulysses, "cu_seqlens": documents} | more
        facts["the machine code"] = None if call is None else call.devices.machine_code()
        return cls(own, call, documents, sharding, facts)


@dataclass(frozen=True)
class OfRank:
    """options: those of the rank's own heads. call: what the ranks outside share; None where there is no other. documents: lengths of
    those in the row, if it has any."""

    options: AttentionOptions
    call: SharedCall | SharedDocuments | None
    documents: tuple[int, ...] | None
    exchange: HeadExchange
    outside: Peers
    facts: Facts

    @classmethod
    def agreed(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        given: Given,
        choices: Choices,
        peers: Peers,
        sharing: Sharing,
        differentiable: bool,
    ) -> OfRank:
        """The same on every rank, or an error on every rank."""

        def make() -> _Part:
            check_tensors(q, k, v)
            given.check(q, choices.dropout_p)
            more: Facts = {**given.facts, "whether gradients are needed": differentiable}
            return _Part.of(q, k, v, options_for(choices, q.shape[-1]), peers, sharing, more)

        part = agree(peers, q.device if isinstance(q, Tensor) else torch.device("cpu"), make)
        inside, outside = inside_and_outside(peers, sharing.ulysses)  # may make groups, which needs all their ranks
        exchange = HeadExchange(inside, part.sharding, peers.rank - peers.rank % sharing.ulysses)
        return cls(part.options, part.call, part.documents, exchange, outside, part.facts)

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
        mail = RankMail(self.outside, call.shared, call.devices.tile_size(*call.dims), lse)
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
