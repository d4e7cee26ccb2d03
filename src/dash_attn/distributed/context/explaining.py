"""explain_context_parallel: what ranks that share a sequence would do and send, without running it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from ...backends import import_backend, resolve_to_explain
from ...call.explanation import Explanation, size_in_words
from ...call.options import AttentionOptions, Choices, options_for
from ...call.planning import describe_call, hash_of
from ...call.tensor_checks import check_flags, check_tensors
from ...masks import Mask
from ...scheduling.order import CONTEXT_PARALLEL_INVARIANT
from ...scheduling.problem import whole_number
from ...scheduling.ranks.sharding import Sharding
from ...scheduling.schedule import Schedule
from ...simulation.cluster import Cluster, simulate_ranks
from ...simulation.simulate import Machine
from .costs import Memory, NumberBytes, RankCosts, Sent, costs_of_sharing
from .document_costs import costs_of_documents, makespan_of
from .documents import Offsets, SharedDocuments, documents_in, shared_call
from .of_rank import Given
from .rows import sharding_of_rank
from .shared_call import SharedCall
from .ulysses import check_factor, outer_sharding

IDEAL = Cluster(Machine(compute=1, reduce=0), workers=1, hop_latency_us=0, bandwidth_GBs=math.inf)  # tasks alone take time
Shared = SharedCall | SharedDocuments
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


def explain_context_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranks: int,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    mask: Mask | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    schedule: str | Schedule = "auto",
    backend: str = "auto",
    head_offset: int = 0,
    sharding: str | Sharding = "zigzag",
    ulysses: int = 1,
    cu_seqlens: Offsets | None = None,
    return_lse: bool = False,
) -> SharedExplanation:
    """What context_parallel_attention with these arguments would do on a group of so many ranks. No group is needed.

    q, k and v are the rows of one rank, as there; they may be on the meta device, with a named backend. It raises what the call would
    raise: so a plan that does not fit is found before anything is launched. return_lse changes nothing: neighbours
    that exchange heads also exchange the gradient of the LSE, be it used or not.
    """
    check_flags(return_lse=return_lse)
    whole_number("ranks", ranks)
    check_tensors(q, k, v)
    Given(sinks, dropout_seed, alibi_slopes).check(q, dropout_p)
    choices = Choices(
        mask=mask,
        causal=causal,
        window_size=window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        schedule=schedule,
        backend=backend,
        head_offset=head_offset,
        dropout_p=dropout_p,
        alibi=alibi_slopes is not None,
    )
    options = options_for(choices, q.shape[-1])
    chosen = sharding_of_rank(sharding, q.shape[1], ranks)
    _check_rows(q, k, chosen)
    check_factor(ulysses, ranks, k.shape[2])
    own, documents = documents_in(options, cu_seqlens, chosen.rows)
    name = resolve_to_explain(options.backend, q.device)
    whole = [torch.empty(x.shape[0], chosen.rows, *x.shape[2:], dtype=x.dtype, device="meta") for x in (q, k, v)]
    alone = _alone(name, whole, options, None if cu_seqlens is None else documents)
    calls = _calls(q, k, v, own, documents, outer_sharding(chosen, ulysses), ulysses, name)
    costs = _costs(q, k, v, chosen, calls, 0 if sinks is None else sinks.element_size())
    return SharedExplanation(
        call=alone.call,
        backend=name,
        ranks=ranks,
        sharding=chosen,
        ulysses=ulysses,
        schedule=alone.schedule,
        order_hash=alone.order_hash,
        guarantees=(*alone.guarantees, CONTEXT_PARALLEL_INVARIANT),
        each=tuple(costs),
        predicted_efficiency=_efficiency(calls),
    )


def _alone(backend: str, whole: list[Tensor], options: AttentionOptions, documents: tuple[int, ...] | None) -> Explanation:
    """What one rank would do. Documents that are not those of a mask are explained one by one."""
    explain = partial(import_backend(backend).explain, options=options, predict_time=False)
    if documents is None:
        return explain(*whole)
    of_length = {length: explain(*(x[:1, :length] for x in whole)) for length in set(documents)}
    each = [of_length[length] for length in documents]
    return replace(
        of_length[max(documents)],
        call=f"{describe_call(whole[0], whole[1], whole[2], options)}, {len(documents)} documents",
        schedule=" and ".join(dict.fromkeys(one.schedule for one in each)),
        order_hash=hash_of(*(one.order_hash for one in each)),
    )


def _check_rows(q: Tensor, k: Tensor, sharding: Sharding) -> None:
    """Of some rank: which one is not known here."""
    fitting = sorted({len(sharding.rows_of(rank)) for rank in range(sharding.ranks)})
    if q.shape[1] != k.shape[1] or q.shape[1] not in fitting:
        raise ValueError(
            f"a rank of this sharding has {' or '.join(map(str, fitting))} of the {sharding.rows} rows, queries and keys alike; got"
            f" {q.shape[1]} queries and {k.shape[1]} keys"
        )


def _calls(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    documents: tuple[int, ...] | None,
    outer: Sharding,
    ulysses: int,
    backend: str,
) -> list[Shared | None]:
    """By place among the neighbours that exchange heads, because each place has heads of its own; None where nothing is shared."""
    if outer.ranks == 1:
        return [None] * ulysses
    each = k.shape[2] // ulysses
    own = [replace(options, head_offset=options.head_offset + place * each) for place in range(ulysses)]
    return [shared_call(q, k, v, chosen, documents, outer, ulysses, backend) for chosen in own]


def _costs(q: Tensor, k: Tensor, v: Tensor, sharding: Sharding, calls: list[Shared | None], sink: int) -> list[RankCosts]:
    """By rank: neighbours follow each other. sink: bytes of one; 0: there are none."""
    ulysses = len(calls)
    bytes_of = NumberBytes(q.element_size(), torch.promote_types(q.dtype, torch.float32).itemsize)
    of_place = [None if call is None else _costs_of(call, bytes_of, sink > 0) for call in calls]
    found = []
    for rank in range(sharding.ranks):
        group, place = divmod(rank, ulysses)
        shared = of_place[place]
        mine = RankCosts(0, 0, Sent(), Sent(), Memory()) if shared is None else shared[group]
        forward, backward = _exchanged((q, k, v), _most_rows(sharding, group, ulysses), ulysses, bytes_of)
        sinks = mine.backward.sinks + (ulysses - 1) * (q.shape[2] // ulysses) * sink
        sent = mine.forward._replace(heads=forward), mine.backward._replace(heads=backward, sinks=sinks)
        found.append(replace(mine, forward=sent[0], backward=sent[1]))
    return found


def _costs_of(call: Shared, bytes_of: NumberBytes, sinks: bool) -> list[RankCosts]:
    if isinstance(call, SharedDocuments):
        return costs_of_documents(call, bytes_of, sinks)
    return costs_of_sharing(call, bytes_of, sinks)


def _most_rows(sharding: Sharding, group: int, ulysses: int) -> int:
    return max(len(sharding.rows_of(rank)) for rank in range(group * ulysses, (group + 1) * ulysses))


def _exchanged(tensors: tuple[Tensor, Tensor, Tensor], rows: int, ulysses: int, bytes_of: NumberBytes) -> tuple[int, int]:
    """Bytes that go to neighbours in the forward and in the backward: of every row, all heads but a rank's own."""
    q, k, v = tensors
    batch, _, q_heads, dim = q.shape
    of_keys = k.shape[2] * (dim + v.shape[3])
    numbers = batch * rows * (ulysses - 1)
    queries, values, statistics = q_heads * dim * bytes_of.tensor, q_heads * v.shape[3] * bytes_of.tensor, q_heads * bytes_of.state
    forward = queries + of_keys * bytes_of.tensor + values + statistics  # q, k, v; out, lse
    backward = 2 * queries + 2 * of_keys * bytes_of.tensor + 2 * values + 2 * statistics  # dout, q, k, v, out, lse, dlse; dq, dk, dv
    return numbers * forward // ulysses, numbers * backward // ulysses


def _efficiency(calls: list[Shared | None]) -> float:
    """All tasks, dealt evenly, against the slowest rank. Where only heads are exchanged, every rank has as many tasks."""
    there = [call for call in calls if call is not None]
    runs = [_run(call) for call in there]
    longest = max((makespan for _, makespan in runs), default=0.0)
    return sum(alone for alone, _ in runs) / (sum(call.sharding.ranks for call in there) * longest) if longest else 1.0


def _run(call: Shared) -> tuple[float, float]:
    """How long one device takes alone, and all together."""
    if isinstance(call, SharedDocuments):
        return makespan_of(call)
    run = simulate_ranks(call.shared, IDEAL, "launch", "chunks")
    return run.one_rank, run.makespan
