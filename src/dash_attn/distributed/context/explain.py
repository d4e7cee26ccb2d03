"""What ranks that share a sequence would do and send, without running it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...attention.explain import explains
from ...backends import import_backend, resolve_to_explain
from ...call.call import Call
from ...call.explain import Explanation, size_in_words
from ...call.options import AttentionOptions, Choices
from ...call.planning import describe_call, hash_of
from ...call.tensor_checks import check_flags
from ...scheduling.order import CONTEXT_PARALLEL_INVARIANT
from ...scheduling.problem import whole_number
from ...scheduling.ranks.sharding import Sharding
from ..peers import Peers
from .asked import Asked, Given, Part, Sharing
from .attention import context_parallel_attention
from .costs import Memory, RankCosts, RowBytes, Sent, costs_of_sharing, makespan_of
from .shared_call import Lengths, SharedCall

NOTE = "of the backward, if a hop takes no time and a unit as long as its tasks; `dash-attn plan --ranks` knows machines and links"


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
        rows = {
            "call": self.call,
            "backend": self.backend,
            "ranks": f"{self.ranks}, {self._chunks()}" + (f", ulysses {self.ulysses}" if self.ulysses > 1 else ""),
            "schedule": f"{self.schedule}, order {self.order_hash}",
            "guarantees": ", ".join(self.guarantees),
            "units": self._spread([rank.units for rank in self.each]),
            "hops": self._spread([rank.hops for rank in self.each]),
            "sent forward": self._largest([rank.forward for rank in self.each]),
            "sent backward": self._largest([rank.backward for rank in self.each]),
            "memory": self._largest([rank.memory for rank in self.each]),
            "predicted": f"efficiency {self.predicted_efficiency:.3f} {self.prediction_note}",
        }
        return "\n".join(f"{name:<13} {text}" for name, text in rows.items())

    def _chunks(self) -> str:
        lengths = sorted(set(self.sharding.lengths))
        rows = f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
        return f"{self.sharding.chunks} chunks of {rows} rows"

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
    asked = _asked(given)
    options, sharding = asked.checked(rank=None)
    name = resolve_to_explain(options.backend, asked.q.device)
    parts = [Part.of(asked, options, sharding, place, name) for place in range(asked.sharing.ulysses)]
    whole = [torch.empty(x.shape[0], sharding.rows, *x.shape[2:], dtype=x.dtype, device="meta") for x in asked[:3]]
    alone = _alone(name, whole, options, None if asked.sharing.cu_seqlens is None else parts[0].documents)
    calls = [part.call for part in parts]
    return SharedExplanation(
        call=alone.call,
        backend=name,
        ranks=asked.ranks,
        sharding=sharding,
        ulysses=asked.sharing.ulysses,
        schedule=alone.schedule,
        order_hash=alone.order_hash,
        guarantees=(*alone.guarantees, CONTEXT_PARALLEL_INVARIANT),
        each=tuple(_costs(asked, sharding, calls)),
        predicted_efficiency=_efficiency([call for call in calls if call is not None]),
    )


def _asked(arguments: Mapping[str, Any]) -> Asked:
    choices, given, sharing = ({name: arguments[name] for name in kind._fields if name in arguments} for kind in (Choices, Given, Sharing))
    group = arguments["group"]
    ranks = whole_number("the number of ranks", group) if isinstance(group, int) else Peers.of(group).count
    alibi = arguments["alibi_slopes"] is not None
    q, k, v = (arguments[name] for name in "qkv")
    return Asked(q, k, v, Given(**given), Choices(**choices, alibi=alibi), Sharing(**sharing), ranks)


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
    of_place = [None if call is None else costs_of_sharing(call, sizes, sinks is not None) for call in calls]
    found = []
    for rank, own in enumerate(rows):
        group, place = divmod(rank, ulysses)
        shared = of_place[place]
        mine = RankCosts(0, 0, Sent(), Sent(), Memory()) if shared is None else shared[group]
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
    runs = [makespan_of(call) for call in calls]
    longest = max((makespan for _, makespan in runs), default=0)
    return sum(tasks for tasks, _ in runs) / (sum(call.sharding.ranks for call in calls) * longest) if longest else 1.0
