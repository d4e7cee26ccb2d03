"""Rotary embedding of the queries and the new keys of a call with a cache, as FlashAttention's arguments ask for it.

PyTorch's operations turn them before anything is appended: pairs of float32 numbers, rounded once. So a token has the bits that it has
where training turns its queries and keys by the same formula.
"""

import torch
from torch import Tensor

from ..call.kv_cache import CacheCall, check_cache
from ..call.tensor_checks import check_strided


def with_rotary(call: CacheCall, cos: Tensor, sin: Tensor, interleaved: bool, whole: bool) -> CacheCall:
    """cos, sin: (positions, half of the dims that turn). interleaved: neighbouring dims are a pair; else those half of them apart.
    whole: every query attends to every key; then all queries turn as the first new key does.
    """
    if not torch.compiler.is_compiling():
        check_cache(call)
    _check(call, cos, sin, whole)
    assert call.k is not None
    first = _first_positions(call)[:, None]
    places = first + torch.arange(call.k.shape[1], device=first.device)
    of_queries = first.expand(-1, call.q.shape[1]) if whole else places
    turned = [_turned(x, at, cos, sin, interleaved) for x, at in ((call.q, of_queries), (call.k, places))]
    return call._replace(q=turned[0], k=turned[1])


def _check(call: CacheCall, cos: Tensor, sin: Tensor, whole: bool) -> None:
    check_strided(rotary_cos=cos, rotary_sin=sin)
    if call.k is None:
        raise ValueError("rotary embeddings are for new keys and the queries beside them: k and v must be given with rotary_cos; got none")
    dim, shape = call.q.shape[-1], tuple(cos.shape)
    if cos.ndim != 2 or sin.shape != cos.shape or 2 * shape[1] > dim or not cos.dtype.is_floating_point or sin.dtype != cos.dtype:
        raise ValueError(
            f"rotary_cos and rotary_sin must both be (positions, dims), dims at most half of the head dim {dim}; got {cos.dtype} of shape"
            f" {shape} and {sin.dtype} of shape {tuple(sin.shape)}"
        )
    if cos.device != call.q.device or sin.device != call.q.device:
        raise ValueError(f"rotary_cos and rotary_sin must be on the device of q ({call.q.device}); got {cos.device} and {sin.device}")
    if isinstance(call.first_position, Tensor):
        raise ValueError("with rotary_cos, first_position must be a number: its table has a row for each position; got a tensor")
    if shape[0] < call.capacity + call.first_position:
        raise ValueError(f"rotary_cos must have a row for each of the {call.capacity + call.first_position} positions; got {shape[0]}")
    if not whole and call.q.shape[1] != call.k.shape[1]:
        raise ValueError(
            f"rotary embeddings of a causal or windowed call need as many queries as new keys; got {call.q.shape[1]} and {call.k.shape[1]}"
        )


def _first_positions(call: CacheCall) -> Tensor:
    """Of the new keys of each sequence: as in FlashAttention those of their slots, also where slots before are padding."""
    return torch.zeros(call.sequences, dtype=torch.int64, device=call.q.device) + call.cache_seqlens + call.first_position


def _turned(x: Tensor, places: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x: (batch, length, heads, dim); places: (batch, length)."""
    turning, rest = x.split((2 * cos.shape[1], x.shape[-1] - 2 * cos.shape[1]), dim=-1)
    dtype = torch.promote_types(x.dtype, torch.float32)
    a, b = (turning[..., ::2], turning[..., 1::2]) if interleaved else turning.chunk(2, dim=-1)
    places = places.clamp(0, len(cos) - 1)  # where the cache has no such slot, its backend says so
    c, s = (table[places][:, :, None].to(dtype) for table in (cos, sin))
    pairs = a.to(dtype) * c - b.to(dtype) * s, a.to(dtype) * s + b.to(dtype) * c
    together = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    return torch.cat([together.to(x.dtype), rest], dim=-1)
