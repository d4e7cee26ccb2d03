"""A call as one rank sees it: exchange heads, gather keys, work through its units."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from ...attention.autograd import attention_backward, attention_forward
from ...attention.observers import SharedPart, observers, tell_observers
from ...backends import resolve
from ...call.given_schedule import in_words
from ...call.options import AttentionOptions, Choices, options_for
from ...call.planning import hash_of
from ...call.sums import sum_in_order
from ...call.tensor_checks import check_sinks, check_tensors
from ...masks import Mask
from ...scheduling.devices.sharding import CutTile, Sharding
from ...scheduling.mask_json import mask_to_json
from ..peers import Peers
from .gathering import GatheredKeys, gather_tiles
from .mail import RankMail
from .passes import BackwardPass, forward_pass
from .rows import sharding_of_rank
from .same_call import Facts, agree
from .shared_call import SharedCall
from .ulysses import HeadExchange, check_factor, inside_and_outside, outer_sharding

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]
Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # dout, q, k, v, out


@dataclass(frozen=True)
class _Part:
    """What a rank finds out by itself, before it knows that the others agree."""

    options: AttentionOptions
    call: SharedCall | None
    sharding: Sharding
    facts: Facts

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, peers: Peers, sharding: Sharding, ulysses: int, more: Facts
    ) -> _Part:
        """Raises where this rank's tensors do not fit. Sends no message."""
        rows = len(sharding.rows_of(peers.rank))
        if not q.shape[1] == k.shape[1] == rows:
            raise ValueError(
                f"rank {peers.rank} has {rows} of the {sharding.rows} rows, queries and keys alike; got {q.shape[1]} queries and"
                f" {k.shape[1]} keys"
            )
        check_factor(ulysses, peers.count, k.shape[2])
        options.mask.check(sharding.rows, sharding.rows)
        place = peers.rank % ulysses
        own = replace(options, head_offset=options.head_offset + place * (k.shape[2] // ulysses))
        outer = outer_sharding(sharding, ulysses)
        try:
            call = SharedCall.of(q, k, v, own, outer, ulysses) if outer.devices > 1 else None
        except CutTile as error:  # it speaks of outer chunks: with Ulysses, as many of the rank's own are one
            raise ValueError(f"{error.words}. {sharding.that_fit(error.unit // math.gcd(error.unit, ulysses))}") from error
        facts = _facts(q, k, v, options) | {"sharding": sharding, "ulysses": ulysses} | more
        facts["the machine code"] = None if call is None else call.devices.machine_code()
        return cls(own, call, sharding, facts)


@dataclass(frozen=True)
class OfRank:
    """options: those of the rank's own heads. call: what the ranks outside share; None where there is no other."""

    options: AttentionOptions
    call: SharedCall | None
    exchange: HeadExchange
    outside: Peers
    facts: Facts

    @classmethod
    def agreed(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        choices: Choices,
        peers: Peers,
        sharding: str | Sharding,
        ulysses: int,
        differentiable: bool,
    ) -> OfRank:
        """The same on every rank, or an error on every rank."""

        def make() -> _Part:
            check_tensors(q, k, v)
            check_sinks(sinks, q)
            chosen = sharding_of_rank(sharding, q.shape[1], peers.count)
            of_sinks = "none" if sinks is None else str(sinks.dtype)
            more: Facts = {"the sinks": of_sinks, "whether gradients are needed": differentiable}
            return _Part.of(q, k, v, options_for(choices, q.shape[-1]), peers, chosen, ulysses, more)

        part = agree(peers, q.device if isinstance(q, Tensor) else torch.device("cpu"), make)
        inside, outside = inside_and_outside(peers, ulysses)  # may make groups, which needs all their ranks
        exchange = HeadExchange(inside, part.sharding, peers.rank - peers.rank % ulysses)
        return cls(part.options, part.call, exchange, outside, part.facts)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Output and LSE of this rank's rows."""
        q, k, v = map(self.exchange.to_heads, (q, k, v))
        own_sinks = self._own(sinks)
        if self.call is None:
            out, lse = attention_forward(q, k, v, self.options, None, own_sinks)
        else:
            out, lse = forward_pass(self.call, self.outside.rank, q, GatheredKeys(self.call, self.outside, k, v), own_sinks)
            if observers:
                part = SharedPart((self.call, self.outside.rank), partial(self.call.described, self.outside.rank))
                tell_observers(q, k, v, self.options, shared=part)
        return self.exchange.to_rows(out), _by_head(self.exchange.to_rows(_by_row(lse)))

    def backward(self, rows: Rows, lse: Tensor, sinks: Tensor | None, dlse: Tensor | None) -> Gradients:
        """dQ, dK and dV of this rank's rows. The sinks' gradient is that of all ranks on the first one, and zero on the others."""
        dout, q, k, v, out = map(self.exchange.to_heads, rows)
        if self.exchange.inside.count > 1 and dlse is None:  # a neighbour may have used its LSE where this rank has not
            dlse = torch.zeros_like(lse)
        dlse = None if dlse is None else _by_head(self.exchange.to_heads(_by_row(dlse)))
        lse = _by_head(self.exchange.to_heads(_by_row(lse)))
        own_sinks = self._own(sinks)
        if self.call is None:
            *gradients, dsinks = attention_backward(dout, q, k, v, out, lse, self.options, None, own_sinks, dlse)
        else:
            *gradients, dsinks = self._share(self.call, (dout, q, k, v, out), lse, own_sinks, dlse)
        dq, dk, dv = map(self.exchange.to_rows, gradients)
        return dq, dk, dv, None if dsinks is None else self._on_first_rank(dsinks)

    def _share(self, call: SharedCall, rows: Rows, lse: Tensor, sinks: Tensor | None, dlse: Tensor | None) -> Gradients:
        dout, q, k, v, out = rows
        keys = GatheredKeys(call, self.outside, k, v)
        mail = RankMail(self.outside, call.shared, call.devices.tile_size(*call.dims), lse)
        work = BackwardPass(call, self.outside.rank, (dout, q, out), (lse, dlse), keys, mail)
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

    def _on_first_rank(self, dsinks: Tensor) -> Tensor:
        whole = self.exchange.inside.gather(dsinks.contiguous())
        return whole if self.exchange.inside.rank == 0 and self.outside.rank == 0 else torch.zeros_like(whole)


def _facts(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Facts:
    """What must be the same on every rank."""
    facts: Facts = {name: getattr(options, name) for name in ("softcap", "accumulation", "head_offset")}
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


def _by_row(x: Tensor) -> Tensor:
    """(batch, heads, rows) -> (batch, rows, heads, 1)."""
    return x.transpose(1, 2)[..., None].contiguous()


def _by_head(x: Tensor) -> Tensor:
    return x[..., 0].transpose(1, 2).contiguous()
