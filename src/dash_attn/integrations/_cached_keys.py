"""Queries that attend what a cache of transformers holds: with the bits of a training forward on the whole sequence.

The layer has joined its new keys to the cache's. Of a static cache it gets all slots, those in use first; of a cache that keeps a
window, what is left. KV tiles are cut by position, so the position of the first key goes along.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..attention.kv_cache import flash_attn_with_kvcache
from ..masks import Causal, Full, Mask, Window
from ._layer_mask import LayerMask

FEW_QUERIES = 64  # up to which the kernel for caches is the faster one; the bits are the same


def goes_to_cache(q: Tensor, k: Tensor, v: Tensor, given: LayerMask, sinks: Tensor | None) -> bool:
    """Whether a cache is attended, and the kernel for caches is the one to do it: that of flash_attn_func has the same bits, and a
    backward. It cannot count positions from elsewhere than the first key."""
    dropped = given.first_position > 0
    trains = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    if dropped and trains:
        raise ValueError(
            f"dash_attn has no backward for a cache that dropped keys, here those before position {given.first_position}:"
            " call the model under torch.no_grad(), or train on the whole sequence with use_cache=False"
        )
    if dropped and given.windows == (None,):
        raise NotImplementedError(
            f"dash_attn got a mask without a window, and a cache that dropped the keys before position {given.first_position}"
        )
    # Padded rows get there with one query, or with none that is padding: places_in_cache refuses others.
    return dropped or (not trains and _has_few_queries(q, given))


def _has_few_queries(q: Tensor, given: LayerMask) -> bool:
    """And many keys. The GPU's kernel reads a cache where it lies, which takes rows of 16 bytes."""
    few = q.shape[1] < given.keys and q.shape[1] <= (FEW_QUERIES if given.padding is None else 1)
    return few and isinstance(given.mask, (Full, Causal, Window)) and q.shape[-1] % 8 == 0


def attend_to_cache(q: Tensor, k: Tensor, v: Tensor, given: LayerMask, options: dict[str, Any]) -> Tensor:
    """Attention of (batch, length, heads, dim) tensors."""
    lengths = given.keys if given.lengths_on_device is None else given.lengths_on_device
    places: dict[str, Any] = {"cache_seqlens": lengths, "first_position": given.first_position}
    if given.places is not None:
        places |= {name: numbers.to(q.device) for name, numbers in given.places.items()}
    out: Tensor = flash_attn_with_kvcache(q, k, v, **places, **_mask_arguments(given.mask), **options)
    return out


def _mask_arguments(mask: Mask) -> dict[str, Any]:
    if isinstance(mask, Window):
        return {"window_size": (mask.left, mask.right)}
    if isinstance(mask, (Full, Causal)):
        return {"causal": isinstance(mask, Causal)}
    raise NotImplementedError(f"dash_attn takes a cache that dropped keys with a full or causal mask or a window; got {mask}")
