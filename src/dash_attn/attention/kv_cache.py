"""flash_attn_with_kvcache: queries that attend to a cache of keys and values, with the bits of the whole forward. And packed queries that
attend to keys and values in pages.

For torch.compile both are torch operators: dash_attn::attention_of_cache, and dash_attn::append_and_attend, which also changes the cache.
A call that appends is one operator, so that no compiler can come between writing and reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch
from torch import Tensor

from ..backends import resolve
from ..call.kv_cache import CacheCall, check_cache
from ..call.offsets import Packed, SequenceOffsets
from ..call.options import AttentionOptions, BackendName, Choices, choose_mask, is_zero, options_for
from ..call.tensor_checks import check_flags, check_strided
from ..masks import Mask, is_whole
from ..masks.encoding import decode_mask, encode_mask
from ..masks.rules import mask_in_words
from .known import KnownCacheCall, KnownCall, attend, has_gradient, known_for
from .operators import Version, in_schema
from .pytorch import is_traced, refuse_transforms
from .rotary import with_rotary
from .signatures import CacheKeywords, No, OutAndLse, Yes
from .torch_ops import check_version, empty_results, has_symbols, packed_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

VERSION = Version(1)  # part of every traced program, as in torch_ops.py


@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *positional: Any, return_softmax_lse: Yes, **options: Unpack[CacheKeywords]
) -> OutAndLse: ...
@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *positional: Any, return_softmax_lse: No = ..., **options: Unpack[CacheKeywords]
) -> Tensor: ...
@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *positional: Any, return_softmax_lse: bool = ..., **options: Unpack[CacheKeywords]
) -> Tensor | OutAndLse: ...
def flash_attn_with_kvcache(  # type: ignore[misc]  # positional choices are FlashAttention's
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    sinks: Tensor | None = None,
    first_position: int | Tensor = 0,
    backend: BackendName = "auto",
) -> Tensor | OutAndLse:
    """Attention of new queries to cached keys and values. Each token has the bits it has in flash_attn_func on the whole sequence.

    q is (batch, new queries, q_heads, dim). k_cache and v_cache are (rows, slots, kv_heads, dim) or, with block_table,
    (pages, page size, kv_heads, dim); pages have a multiple of 16 rows. The last query is aligned with the last key.

    k, v: (batch, new keys, kv_heads, dim), appended to the caches in place before attention.
    cache_seqlens: how many slots of each sequence are in use before the call, left padding included: a number or an int32 tensor
        (batch,). None means all, and nothing can be appended.
    cache_batch_idx: int32 (batch,), the row of the cache that belongs to each sequence. None: sequence i has row i.
    cache_leftpad: int32 (batch,), the slot of each sequence's first key. Positions are counted from it.
    block_table: int32 (batch, entries), the pages of each sequence. Entries after its last key, or before its window, are not read.
    softmax_scale, causal, window_size, softcap, sinks, backend: as in flash_attn_func.
    first_position: the position of each sequence's first cached key, if a cache dropped those before a window: a number or an
        int32 tensor (batch,). KV tiles are cut by position, so bits depend on it.
    num_splits: 0 or 1. How work is split never changes bits, and the caller cannot choose it.

    rotary_cos, rotary_sin, rotary_interleaved: turn k and q before k is appended, as in FlashAttention: (positions, half of the dims that
        turn), a row for each slot. A new key turns by its slot (cache_leftpad is not taken off), a query by that of the new key at its
        index; if the mask is full, by that of the first new key.

    alibi_slopes raise. There is no backward: a tensor that requires a gradient raises.
    The contents of unused slots do not matter, not even NaN. On the GPU lengths and pages are not read on the host: a kernel checks
    them and, like PyTorch's device-side assertions, stops the CUDA context with a message. Nothing is written outside the cache.

    Returns out, (batch, new queries, q_heads, dim of v); (out, lse) with `return_softmax_lse`, lse as in flash_attn_func.
    """
    refuse_transforms()
    known, tensors = None, (q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    if cache_seqlens is not None and sinks is None and rotary_cos is None and rotary_sin is None and alibi_slopes is None:
        flags = causal, num_splits, return_softmax_lse, rotary_interleaved
        known = _known_of(tensors, first_position, window_size, *flags, softmax_scale, softcap, backend)
    if known is not None and known.options is not None:
        out, lse = known.forward(CacheCall(q, k_cache, v_cache, known.options, k, v, None, *tensors[5:]))  # type: ignore[arg-type]
        return (out, lse) if return_softmax_lse else out
    check_flags(return_softmax_lse=return_softmax_lse, rotary_interleaved=rotary_interleaved)
    refuse_unsupported(alibi_slopes, num_splits)
    refuse_gradients(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, sinks=sinks, rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    call = with_lengths(CacheCall(q, k_cache, v_cache, None, k, v, sinks, *tensors[5:], first_position))  # type: ignore[arg-type]
    choices = Choices(causal=causal, window_size=window_size, softmax_scale=softmax_scale, softcap=softcap, backend=backend)
    if rotary_cos is not None or rotary_sin is not None:
        whole = not causal and window_size in ((-1, -1), [-1, -1])
        call = with_rotary(call, rotary_cos, rotary_sin, rotary_interleaved, whole)  # type: ignore[arg-type]  # None is refused
    out, lse = _run(call, None, choices, known)
    return (out, lse) if return_softmax_lse else out


def with_lengths(call: CacheCall) -> CacheCall:
    """Without lengths every slot is in use."""
    if (call.k is None) != (call.v is None):
        raise ValueError(f"k and v must be given together; got {'v' if call.k is None else 'k'} alone")
    if call.cache_seqlens is not None:
        return call
    if call.k is not None:
        raise ValueError("k and v are appended after the keys in use: cache_seqlens must say how many there are; got None")
    check_strided(k_cache=call.k_cache)
    slots, table = call.k_cache.shape[1] if call.k_cache.ndim == 4 else 0, call.block_table
    return call._replace(cache_seqlens=slots * table.shape[1] if isinstance(table, Tensor) and table.ndim == 2 else slots)


def _known_of(tensors: tuple[Any, ...], first_position: Any, window_size: Any, *choices: Any) -> KnownCall | None:
    """None where a gradient would be refused, or a number says where keys are: it would be another one in every step."""
    there = tuple([x for x in tensors if x is not None])
    if torch.compiler.is_compiling() or type(first_position) is not int or first_position or type(window_size) is not tuple:
        return None
    if not all([isinstance(x, Tensor) for x in there]) or has_gradient(*there):  # noqa: C419 (quicker so)
        return None
    return known_for(there, *[x is None for x in tensors], *window_size, *choices, of=KnownCacheCall)


def _run(call: CacheCall, packed: Packed | None, choices: Choices, known: KnownCall | None = None) -> tuple[Tensor, Tensor]:
    """Output and LSE."""
    if is_traced(*(x for x in (*call, *(packed or ())) if isinstance(x, Tensor))):
        check_strided(q=call.q, k_cache=call.k_cache, v_cache=call.v_cache)
        return run_traced(call, packed, choices)
    if packed is not None:
        call = call._replace(offsets=SequenceOffsets(*packed))
    check_cache(call)
    call = call._replace(options=options_for(choices, call.q.shape[-1]))
    if known is None:
        return attend(call)
    known.options = call.options
    return known.forward(call)


def refuse_gradients(**tensors: Tensor | None) -> None:
    """A gradient that is silently missing trains something else."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise ValueError(
                f"attention to a cache has no backward, and {name} requires a gradient: call it under torch.no_grad() or"
                " torch.inference_mode(), or train with flash_attn_func, which has the same bits"
            )


def refuse_unsupported(alibi_slopes: Any, num_splits: Any) -> None:
    """Arguments of FlashAttention that cannot be honoured."""
    if alibi_slopes is not None:
        raise ValueError("attention to a cache has no ALiBi: alibi_slopes must be None. flash_attn_func on the whole sequence has it")
    if not is_whole(num_splits) or num_splits not in (0, 1):
        raise ValueError(f"num_splits must be 0 or 1, because sums of splits would have other bits; got {num_splits!r}")


def attention_of_pages(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, block_table: Tensor, packed: Packed, choices: Choices
) -> tuple[Tensor, Tensor]:
    """flash_attn_varlen_func with a block table: output and LSE. Of the keys' offsets only the lengths count."""
    _refuse_choices(choices)
    refuse_gradients(q=q, k=k, v=v, sinks=sinks)
    if not torch.compiler.is_compiling():
        SequenceOffsets(*packed)  # checks its fields
    ends = packed[1]
    call = CacheCall(q, k, v, sinks=sinks, cache_seqlens=ends[1:] - ends[:-1], block_table=block_table)
    return _run(call, packed, choices)


def _refuse_choices(choices: Choices) -> None:
    """What only a backward needs, and masks that pages do not take."""
    if choices.mask is not None and not (isinstance(choices.mask, Mask) and choices.mask.sides):
        raise ValueError(f"keys in pages take a full or causal mask or a window; got mask={mask_in_words(choices.mask)}")
    if not isinstance(choices.schedule, str) or choices.schedule != "auto":
        raise ValueError(
            f"keys in pages have no backward, so there is nothing to schedule: schedule must be 'auto'; got {choices.schedule!r}"
        )
    if not is_zero(choices.dropout_p) or choices.alibi:
        asked = "alibi_slopes" if choices.alibi else f"dropout_p={choices.dropout_p!r}"
        raise ValueError(f"keys in pages take no dropout and no ALiBi: dropout_p must be 0 and alibi_slopes None; got {asked}")
    if choices.accumulation != "ordered":
        raise ValueError(f"keys in pages have no backward: accumulation must be 'ordered'; got {choices.accumulation!r}")


class CacheArguments(NamedTuple):
    """What both operators take behind the tensors that they attend to, in the order of their schema."""

    sinks: Tensor | None
    cache_seqlens: Tensor | None
    cache_length: int  # of every sequence, if there is no tensor
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    block_table: Tensor | None
    first_positions: Tensor | None
    first_position: int  # of every sequence, if there is no tensor
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    mask: str
    mask_sizes: Sequence[int]
    scale: float | None
    softcap: float
    backend: str
    version: Version


REST = in_schema(CacheArguments)
ATTEND = f"(Tensor q, Tensor k_cache, Tensor v_cache, {REST}) -> (Tensor, Tensor)"
APPEND = f"(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, {REST}) -> (Tensor, Tensor)"


def run_traced(call: CacheCall, offsets: Packed | None, choices: Choices) -> tuple[Tensor, Tensor]:
    """The operator."""
    places = *_in_schema(call.cache_seqlens), call.cache_batch_idx, call.cache_leftpad, call.block_table, *_in_schema(call.first_position)
    mask = encode_mask(choose_mask(choices.mask, choices.causal, choices.window_size))
    chosen = *mask, choices.softmax_scale, choices.softcap, choices.backend
    arguments = call.sinks, *places, *(offsets or (None, None, 0, 0)), *chosen, VERSION
    if call.k is None and call.v is None:
        out, lse = torch.ops.dash_attn.attention_of_cache(*call[:3], *arguments)
    else:
        out, lse = torch.ops.dash_attn.append_and_attend(*call[:3], call.k, call.v, *arguments)
    return out, lse


def _in_schema(numbers: Tensor | int) -> tuple[Tensor | None, int]:
    """One per sequence, or one of all."""
    return (numbers, 0) if isinstance(numbers, Tensor) else (None, numbers)


def _define(name: str, tensors: int, schema: str, mutates: tuple[str, ...]) -> None:
    """An operator of so many tensors, and CacheArguments."""

    def run(*given: Any) -> tuple[Tensor, Tensor]:
        out, lse = attend(_read(given[:tensors], CacheArguments(*given[tensors:])))
        return out, lse

    def shapes(*given: Any) -> tuple[Tensor, Tensor]:
        call = _read(given[:tensors], CacheArguments(*given[tensors:]))
        return empty_results(call.q, call.v_cache.shape[-1])

    torch.library.custom_op(f"dash_attn::{name}", run, mutates_args=mutates, schema=schema).register_fake(shapes)


def _read(tensors: tuple[Tensor, ...], arguments: CacheArguments) -> CacheCall:
    """The arguments, checked. While a program is traced a number may be a symbol; then options are read when it runs."""
    check_version(arguments.version, VERSION, "cache operators")
    q, k_cache, v_cache, *new = tensors
    k, v = new or (None, None)
    lengths = arguments.cache_length if arguments.cache_seqlens is None else arguments.cache_seqlens
    positions = arguments.first_position if arguments.first_positions is None else arguments.first_positions
    rest = {name: getattr(arguments, name) for name in ("sinks", "cache_batch_idx", "cache_leftpad", "block_table")}
    packed = packed_of(arguments)
    offsets = None if packed is None else SequenceOffsets(*packed)
    call = CacheCall(q, k_cache, v_cache, k=k, v=v, cache_seqlens=lengths, first_position=positions, offsets=offsets, **rest)
    check_cache(call)
    scale = q.shape[-1] ** -0.5 if arguments.scale is None else arguments.scale
    if has_symbols(*arguments.mask_sizes, scale, arguments.softcap):
        return call
    mask = decode_mask(arguments.mask, tuple(arguments.mask_sizes))
    options = AttentionOptions(mask, scale, arguments.softcap, backend=arguments.backend)
    resolve(options.backend, q.device)
    return call._replace(options=options)


_define("attention_of_cache", 3, ATTEND, ())
_define("append_and_attend", 5, APPEND, ("k_cache", "v_cache"))
