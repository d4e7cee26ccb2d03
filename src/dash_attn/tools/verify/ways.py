"""Other ways to the bits of a case, each with a control that must differ.

Its tokens through a cache, in chunks and one by one: each must have the bits of the whole forward.
Its sequence on several ranks: one process plays them all, on the backend under test.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...attention.functions import flash_attn_func
from ...attention.kv_cache import flash_attn_with_kvcache
from ...backends import import_ranks, resolve
from ...call.options import Choices, options_for
from ...distributed.context.attention import context_parallel_attention
from ...distributed.context.loopback import play_all_ranks
from ...distributed.context.rows import documents_in, rows_of
from ...distributed.context.shared_call import SharedCall
from ...distributed.context.ulysses import outer_sharding
from ...masks import Causal, Full, Window
from ...scheduling.order import CONTEXT_PARALLEL_INVARIANT
from ...scheduling.ranks.sharding import SHARDINGS, Sharding
from ...viewing.words import counted
from .cases import DTYPES, Case, Extras, Inputs, Results, attend, poisoned_memory, results_of

PAGE_SIZES = (0, 16, 48)  # 0: rows
STEPS = (1, 1, 1, 4, 64)  # behind a prompt of half the sequence; the rest comes at once
DETAIL = "rows, pages of 16 and of 48 slots; a prompt, single tokens and chunks; slots that are not in use were NaN"


def can_decode(case: Case, device: str) -> bool:
    """Whether a cache can serve the case: a token must attend to all keys, or none behind it."""
    mask = case.read_mask()
    alone = isinstance(mask, (Full, Causal)) or (isinstance(mask, Window) and mask.right == 0)
    return alone and (device == "cpu" or case.head_dim % 8 == 0)


def through_caches(case: Case, inputs: Inputs, plain: Results, extras: Extras | None = None) -> Iterator[tuple[str, Results]]:
    """What each kind of cache gives, in words and in bits, with the gradients of `plain`."""
    sinks = None if extras is None else extras.sinks
    for page_size in PAGE_SIZES:
        with poisoned_memory(), torch.no_grad():
            out, lse = _decoded(case, inputs, page_size, sinks)
        yield f"pages of {page_size}" if page_size else "rows", plain._replace(out=out.cpu(), lse=lse.cpu())


def recombined_halves(case: Case, inputs: Inputs, plain: Results) -> Results:
    """The control: attention of the last query to two halves of its keys, joined by their LSE as kernels do that split them."""
    q, k, v, _ = (x.detach() for x in inputs)
    mask, length = case.read_mask(), case.seqlen
    first = max(0, length - 1 - mask.left) if isinstance(mask, Window) and mask.left >= 0 else 0
    cut = (first + length) // 2
    halves = [flash_attn_func(q[:, -1:], k[:, part], v[:, part], return_lse=True) for part in (slice(first, cut), slice(cut, length))]
    lses = torch.stack([lse.double() for _, lse in halves])
    lse = lses.logsumexp(0)
    weights = (lses - lse).exp().transpose(2, 3)[..., None]
    joined = weights[0] * halves[0][0].double() + weights[1] * halves[1][0].double()
    changed = plain._replace(out=plain.out.clone(), lse=plain.lse.clone())
    changed.out[:, -1:], changed.lse[:, :, -1:] = joined.cpu().to(plain.out.dtype), lse.cpu().to(plain.lse.dtype)
    return changed


def _decoded(case: Case, inputs: Inputs, page_size: int, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and LSE of one batch on its way through a cache."""
    q, k, v, _ = (x.detach() for x in inputs)
    mask, ((k_cache, v_cache), places) = case.read_mask(), _empty_caches(case, (k, v), page_size)
    window = (mask.left, 0) if isinstance(mask, Window) else (-1, -1)
    options: dict[str, Any] = {"causal": not isinstance(mask, Full), "window_size": window, "sinks": sinks}
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = torch.full_like(q, torch.nan), q.new_full((case.batch, case.heads, case.seqlen), torch.nan, dtype=wide)
    for chosen, done, count in _turns(case):
        rows = [(i, slice(n, n + count)) for i, n in zip(chosen, done, strict=True)]
        asked, *new = (torch.stack([x[i, part] for i, part in rows]) for x in (q, k, v))
        if isinstance(mask, Full):  # all keys come before any query
            new = [] if any(done) else [k[chosen], v[chosen]]
            done = [case.seqlen if any(done) else 0] * len(chosen)
        there: dict[str, Any] = {name: numbers[chosen].to(q.device) for name, numbers in places.items()}
        there["cache_seqlens"] = torch.tensor(done, dtype=torch.int32, device=q.device)
        found = flash_attn_with_kvcache(asked, k_cache, v_cache, *new, **there, **options, return_softmax_lse=True)
        for place, (i, part) in enumerate(rows):
            out[i, part], lse[i, :, part] = found[0][place], found[1][place]
    return out, lse


def _empty_caches(case: Case, like: Sequence[Tensor], page_size: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Of keys and of values, in rows or pages; and where each sequence is in them."""
    slots = case.seqlen + 5
    columns, size = (-(-slots // page_size), page_size) if page_size else (1, slots)
    caches = [torch.full((columns * case.batch + 1, size, *x.shape[2:]), torch.nan, dtype=x.dtype).to(x.device) for x in like]
    dealt = torch.arange(columns * case.batch, 0, -1, dtype=torch.int32).view(columns, case.batch).t().contiguous()
    return caches, {"block_table": dealt} if page_size else {"cache_batch_idx": dealt[:, 0].contiguous()}


def _turns(case: Case) -> Iterator[tuple[list[int], list[int], int]]:
    """Which sequences come together, how many tokens of each have come before, and how many come: prompts alone, which leave sequences at
    different lengths, then single tokens of all, the rest alone."""
    done, length = [0] * case.batch, case.seqlen

    def turn(chosen: list[int], count: int) -> tuple[list[int], list[int], int]:
        before = [done[i] for i in chosen]
        for i in chosen:
            done[i] += count
        return chosen, before, count

    for i in range(case.batch):
        yield turn([i], min(length // 2 + 1 + 3 * i, length))
    for count in STEPS:
        if able := [i for i, n in enumerate(done) if length - n >= count]:
            yield turn(able, count)
    for i in range(case.batch):
        if done[i] < length:
            yield turn([i], length - done[i])


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
                    raise ValueError(f"{counted(count, 'rank')} cannot share {case} ({sharding}): {error}") from None


def on_ranks(case: Case, inputs: Inputs, ranks: Sequence[int], extras: Extras | None = None) -> Iterator[tuple[str, Results]]:
    """What as many ranks compute together, in words and in bits."""
    for count in ranks:
        for sharding in SHARDINGS:
            play = _play if count > 1 else _alone
            yield f"{counted(count, 'rank')}, {sharding}", play(case, inputs, Sharding.named(sharding, case.seqlen, count), extras)


def _play(case: Case, inputs: Inputs, sharding: Sharding, extras: Extras | None) -> Results:
    more = {} if extras is None else extras._asdict()
    with poisoned_memory(), torch.no_grad():
        found = play_all_ranks(_call(case, *inputs[:2], sharding), *inputs, **more)
    return results_of(*(x for x in found if x is not None))


def _alone(case: Case, inputs: Inputs, sharding: Sharding, extras: Extras | None) -> Results:
    """One rank shares nothing, and plans nothing to share."""
    return attend(case, inputs, partial(context_parallel_attention, sharding=sharding), extras)


def added_up(case: Case, inputs: Inputs, ranks: int, plain: Results) -> Results:
    """The control: each rank sums dK and dV over its own queries, and the sums are added up rank by rank, as an all-reduce does."""
    q, k, v, dout = inputs
    sharding = Sharding.zigzag(case.seqlen, ranks)
    wide = torch.promote_types(q.dtype, torch.float32)
    dk, dv = (torch.zeros(x.shape, dtype=wide) for x in (plain.dk, plain.dv))
    for rank in range(ranks):
        own, rows = torch.zeros_like(dout), rows_of(sharding, rank, dout.device)
        own[:, rows] = dout[:, rows]
        found = attend(case, Inputs(q, k, v, own))
        dk += found.dk
        dv += found.dv
    return plain._replace(dk=dk.to(plain.dk.dtype), dv=dv.to(plain.dv.dtype))


def _call(case: Case, q: Tensor, k: Tensor, sharding: Sharding) -> SharedCall:
    options = options_for(Choices(mask=case.read_mask(), schedule=case.schedule), case.head_dim)
    options, documents = documents_in(options, None, sharding.rows)
    # As ranks do: neighbouring chunks of one rank are one.
    return SharedCall.of((q, k, k), options, outer_sharding(sharding, ulysses=1), documents)
