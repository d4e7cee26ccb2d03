"""The sequence of a case on several ranks. One process plays them all, on the backend under test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from ...backends import import_ranks, resolve
from ...call.options import Choices, options_for
from ...distributed.context.attention import context_parallel_attention
from ...distributed.context.loopback import play_all_ranks
from ...distributed.context.rows import documents_in, rows_of
from ...distributed.context.shared_call import SharedCall
from ...distributed.context.ulysses import outer_sharding
from ...scheduling.order import CONTEXT_PARALLEL_INVARIANT
from ...scheduling.ranks.sharding import SHARDINGS, Sharding
from .cases import DTYPES, Case, Extras, Inputs, Results, attend, poisoned_memory, results_of


def name_of(ranks: Sequence[int]) -> str:
    """The guarantee as a certificate reports it: no more ranks than were played."""
    return f"{CONTEXT_PARALLEL_INVARIANT} ({', '.join(map(str, ranks))} ranks)"


def check_ranks(cases: Sequence[Case], device: str, ranks: Sequence[int], backend: str = "auto") -> None:
    """Raise unless as many ranks can share every case, in either sharding, and there is something to show."""
    if not ranks:
        return
    if min(ranks) < 1 or max(ranks) < 2:
        raise ValueError(f"ranks must be whole numbers >= 1, one of them above 1: one rank alone shares nothing; got {list(ranks)}")
    import_ranks(resolve(backend, torch.device(device)))  # raises where the backend cannot share a sequence
    for case in cases:
        like = torch.empty(case.batch, 1, case.heads, case.head_dim, dtype=DTYPES[case.dtype], device=device)
        for count in ranks:
            for sharding in SHARDINGS:
                try:
                    shared = Sharding.named(sharding, case.seqlen, count)
                    if count > 1:
                        _call(case, like, like[:, :, : case.kv_heads], shared)
                except ValueError as error:
                    raise ValueError(f"{in_words(count)} cannot share {case} ({sharding}): {error}") from None


def on_ranks(case: Case, inputs: Inputs, ranks: Sequence[int], extras: Extras | None = None) -> Iterator[tuple[str, Results]]:
    """What as many ranks compute together, in words and in bits."""
    for count in ranks:
        for sharding in SHARDINGS:
            play = _play if count > 1 else _alone
            yield f"{in_words(count)}, {sharding}", play(case, inputs, Sharding.named(sharding, case.seqlen, count), extras)


def in_words(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _play(case: Case, inputs: Inputs, sharding: Sharding, extras: Extras | None) -> Results:
    more = {} if extras is None else extras._asdict()
    with poisoned_memory(), torch.no_grad():
        found = play_all_ranks(_call(case, *inputs[:2], sharding), *inputs, **more)
    return results_of(*(x for x in found if x is not None))


def _alone(case: Case, inputs: Inputs, sharding: Sharding, extras: Extras | None) -> Results:
    """One rank shares nothing, and plans nothing to share."""
    return attend(inputs, case.read_mask(), case.schedule, partial(context_parallel_attention, sharding=sharding), extras)


def added_up(case: Case, inputs: Inputs, ranks: int, plain: Results) -> Results:
    """The control: each rank sums dK and dV over its own queries, and the sums are added up rank by rank, as an all-reduce does."""
    q, k, v, dout = inputs
    sharding = Sharding.zigzag(case.seqlen, ranks)
    wide = torch.promote_types(q.dtype, torch.float32)
    dk, dv = (torch.zeros(x.shape, dtype=wide) for x in (plain.dk, plain.dv))
    for rank in range(ranks):
        own, rows = torch.zeros_like(dout), rows_of(sharding, rank, dout.device)
        own[:, rows] = dout[:, rows]
        found = attend(Inputs(q, k, v, own), case.read_mask(), case.schedule)
        dk += found.dk
        dv += found.dv
    return plain._replace(dk=dk.to(plain.dk.dtype), dv=dv.to(plain.dv.dtype))


def _call(case: Case, q: Tensor, k: Tensor, sharding: Sharding) -> SharedCall:
    options = options_for(Choices(mask=case.read_mask(), schedule=case.schedule), case.head_dim)
    options, documents = documents_in(options, None, sharding.rows)
    # As ranks do: neighbouring chunks of one rank are one.
    return SharedCall.of((q, k, k), options, outer_sharding(sharding, ulysses=1), documents)
