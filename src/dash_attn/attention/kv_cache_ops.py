"""Attention to a cache as torch operators, for torch.compile: dash_attn::attention_of_cache, and dash_attn::append_and_attend,
which also changes the cache.

A call that appends is one operator, so that no compiler can come between writing and reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends import cache_backend_for, resolve
from ..call.call import Saved
from ..call.kv_cache import CacheCall, check_cache
from ..call.options import AttentionOptions, Choices, choose_mask
from ..masks.encoding import decode_mask, encode_mask
from .call_log import LOG_CALLS, log_cache_call
from .torch_ops import check_version, empty_results, has_symbols, offsets_of

PLACES = (
    "Tensor? cache_seqlens, SymInt cache_length, Tensor? cache_batch_idx, Tensor? cache_leftpad, Tensor? block_table,"
    " Tensor? first_positions, SymInt first_position"
)
PACKED = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
CHOICES = "str mask, SymInt[] mask_sizes, float? scale, float softcap, str backend"
REST = f"Tensor? sinks, {PLACES}, {PACKED}, {CHOICES}, int version"
VERSION = 1  # part of every traced program, as in torch_ops.py
ATTEND = f"(Tensor q, Tensor k_cache, Tensor v_cache, {REST}) -> (Tensor, Tensor)"
APPEND = f"(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, {REST}) -> (Tensor, Tensor)"


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
    version: int


def attend(call: CacheCall) -> Saved:
    """Of a call that was checked."""
    if LOG_CALLS:
        log_cache_call(call)
    return cache_backend_for(call.options.backend, call.q.device).attention_with_cache(call)


def run_traced(call: CacheCall, offsets: tuple[Tensor, Tensor, int, int] | None, choices: Choices) -> tuple[Tensor, Tensor]:
    """The operator. offsets: SequenceOffsets' fields."""
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
    offsets = offsets_of(arguments)
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
