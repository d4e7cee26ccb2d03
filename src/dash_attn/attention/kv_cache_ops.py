"""Attention to a cache as torch operators, for torch.compile: dash_attn::attention_of_cache, and dash_attn::append_and_attend,
which also changes the cache.

A call that appends is one operator, so that no compiler can come between writing and reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import SymFloat, SymInt, Tensor

from ..backends import cache_backend_for, resolve
from ..call.kv_cache import CachePlaces, CacheTensors, check_cache
from ..call.offsets import SequenceOffsets
from ..call.options import AttentionOptions, Choices, choose_mask, options_for
from ..call.tensor_checks import check_sinks
from .call_log import LOG_CALLS, log_cache_call
from .mask_arguments import decode_mask, encode_mask

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


def run_eagerly(tensors: CacheTensors, places: CachePlaces, offsets: SequenceOffsets | None, choices: Choices) -> tuple[Tensor, Tensor]:
    """Checked, then run."""
    _check(tensors, places, offsets)
    return _attend(tensors, places, options_for(choices, tensors.q.shape[-1]), offsets)


def _attend(
    tensors: CacheTensors, places: CachePlaces, options: AttentionOptions, offsets: SequenceOffsets | None
) -> tuple[Tensor, Tensor]:
    if LOG_CALLS:
        log_cache_call(tensors, places, options, offsets is not None)
    return cache_backend_for(options.backend, tensors.q.device).attention_with_cache(tensors, places, options, offsets)


def run_traced(
    tensors: CacheTensors, places: CachePlaces, offsets: tuple[Tensor, Tensor, int, int] | None, choices: Choices
) -> tuple[Tensor, Tensor]:
    """The operator. offsets: SequenceOffsets' fields."""
    name, sizes = encode_mask(choose_mask(choices.mask, choices.causal, choices.window_size))
    lengths, positions = places.cache_seqlens, places.first_position
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = offsets or (None, None, 0, 0)
    arguments = CacheArguments(
        sinks=tensors.sinks,
        cache_seqlens=lengths if isinstance(lengths, Tensor) else None,
        cache_length=0 if isinstance(lengths, Tensor) else lengths,
        cache_batch_idx=places.cache_batch_idx,
        cache_leftpad=places.cache_leftpad,
        block_table=places.block_table,
        first_positions=positions if isinstance(positions, Tensor) else None,
        first_position=0 if isinstance(positions, Tensor) else positions,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        mask=name,
        mask_sizes=sizes,
        scale=choices.softmax_scale,
        softcap=choices.softcap,
        backend=choices.backend,
        version=VERSION,
    )
    caches = tensors.q, tensors.k_cache, tensors.v_cache
    if tensors.k is None and tensors.v is None:
        out, lse = torch.ops.dash_attn.attention_of_cache(*caches, *arguments)
    else:
        out, lse = torch.ops.dash_attn.append_and_attend(*caches, tensors.k, tensors.v, *arguments)
    return out, lse


@torch.library.custom_op("dash_attn::attention_of_cache", mutates_args=(), schema=ATTEND)
def attention_of_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _run(CacheTensors(q, k_cache, v_cache), CacheArguments(*rest))


@torch.library.custom_op("dash_attn::append_and_attend", mutates_args=("k_cache", "v_cache"), schema=APPEND)
def append_and_attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _run(CacheTensors(q, k_cache, v_cache, k, v), CacheArguments(*rest))


@attention_of_cache.register_fake
def _(q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _shapes(CacheTensors(q, k_cache, v_cache), CacheArguments(*rest))


@append_and_attend.register_fake
def _(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _shapes(CacheTensors(q, k_cache, v_cache, k, v), CacheArguments(*rest))


def _run(tensors: CacheTensors, arguments: CacheArguments) -> tuple[Tensor, Tensor]:
    tensors, places, offsets, options = _read(tensors, arguments)
    assert options is not None, "a program that runs has no symbols"
    return _attend(tensors, places, options, offsets)


def _shapes(tensors: CacheTensors, arguments: CacheArguments) -> tuple[Tensor, Tensor]:
    _read(tensors, arguments)
    q = tensors.q
    *batch, length, heads, _ = q.shape
    lse = q.new_empty((*batch, heads, length), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    return q.new_empty((*batch, length, heads, tensors.v_cache.shape[-1])), lse


def _read(
    tensors: CacheTensors, arguments: CacheArguments
) -> tuple[CacheTensors, CachePlaces, SequenceOffsets | None, AttentionOptions | None]:
    """The arguments, checked. While a program is traced a number may be a symbol; then options are read when it runs."""
    if arguments.version != VERSION:
        raise RuntimeError(
            f"this program was traced with version {arguments.version} of dash_attn's cache operators, and here they have version"
            f" {VERSION}: compile or export it again"
        )
    tensors = CacheTensors(tensors.q, tensors.k_cache, tensors.v_cache, tensors.k, tensors.v, arguments.sinks)
    places = CachePlaces(
        arguments.cache_length if arguments.cache_seqlens is None else arguments.cache_seqlens,
        0 if tensors.k is None else tensors.k.shape[1],
        arguments.cache_batch_idx,
        arguments.cache_leftpad,
        arguments.block_table,
        arguments.first_position if arguments.first_positions is None else arguments.first_positions,
    )
    offsets = _offsets(arguments)
    _check(tensors, places, offsets)
    scale = tensors.q.shape[-1] ** -0.5 if arguments.scale is None else arguments.scale
    if any(isinstance(number, (SymInt, SymFloat)) for number in (*arguments.mask_sizes, scale, arguments.softcap)):
        return tensors, places, offsets, None
    mask = decode_mask(arguments.mask, tuple(arguments.mask_sizes))
    options = AttentionOptions(mask, scale, arguments.softcap, backend=arguments.backend)
    resolve(options.backend, tensors.q.device)
    return tensors, places, offsets, options


def _offsets(arguments: CacheArguments) -> SequenceOffsets | None:
    if arguments.cu_seqlens_q is None or arguments.cu_seqlens_k is None:
        return None
    longest = (0 if isinstance(length, SymInt) else length for length in (arguments.max_seqlen_q, arguments.max_seqlen_k))
    return SequenceOffsets(arguments.cu_seqlens_q, arguments.cu_seqlens_k, *longest)


def _check(tensors: CacheTensors, places: CachePlaces, offsets: SequenceOffsets | None) -> None:
    check_cache(tensors, places, offsets)
    check_sinks(tensors.sinks, tensors.q)
    if offsets is not None:
        offsets.check_device(tensors.q.device)
