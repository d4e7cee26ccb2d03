"""Queries that attend to what a cache of transformers holds: with the bits of a training forward on the whole sequence.

The layer has joined its new keys to the cache's. Of a static cache it gets all slots, those in use first; of a cache that keeps a
window, what is left. KV tiles are cut by position, so the position of the first key goes along.

In continuous batching (`generate_batch`) requests of any lengths are in one packed batch, their keys in pages. The cache writes the new
keys into its pages and gathers those of every request, end to end. Where a key lay does not matter to the bits; where its sequence
begins does, so requests that have grown past a sliding window are told apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.kv_cache import flash_attn_with_kvcache
from ..attention.varlen import flash_attn_varlen_func
from ..call.offsets import SequenceOffsets
from ..door import Change
from ..libraries import LEAST_WITH_PAGES, check_library, installed, numbers
from ..masks import Causal, Full, Mask, Window
from ._documents import offsets_of_arguments
from ._layer_mask import NAME, LayerMask

FEW_QUERIES = 64  # up to which the kernel for caches is the faster one; the bits are the same
# What the model is given for the cache of continuous batching, and not for us.
OLDER = ("max_seqlen_q", "max_seqlen_k")  # names of lengths before transformers 5.19
FOR_THE_CACHE = ("cache", "read_index", "write_index", "block_table", "logits_indices", "logits_processor_args", *OLDER)


def goes_to_cache(q: Tensor, k: Tensor, v: Tensor, given: LayerMask, sinks: Tensor | None) -> bool:
    """Whether a cache is attended, and the kernel for caches is the one to do it: that of flash_attn_func has the same bits, and a
    backward. It cannot count positions from elsewhere than the first key."""
    if isinstance(given.mask, Tensor):
        return False
    dropped = given.first_position > 0
    trains = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    if dropped and trains:
        raise ValueError(
            f"dash_attn has no backward for a cache that dropped keys, here those before position {given.first_position}:"
            " call the model under torch.no_grad(), or train on the whole sequence with use_cache=False"
        )
    if dropped and given.windows == (None,) and q.shape[1] > 1:
        raise NotImplementedError(
            f"dash_attn got a mask without a window, and a cache that dropped the keys before position {given.first_position}: one new"
            " token at a time attends to what is left"
        )
    # Padded rows get there with one query, or with none that is padding: places_in_cache refuses others.
    few = q.shape[1] < given.keys and q.shape[1] <= (FEW_QUERIES if given.padding is None else 1)
    # The GPU's kernel reads rows of 16 bytes where they lie.
    readable = isinstance(given.mask, (Full, Causal, Window)) and q.shape[-1] % 8 == 0
    return dropped or (not trains and few and readable)


def attend_to_cache(q: Tensor, k: Tensor, v: Tensor, given: LayerMask, options: dict[str, Any]) -> Tensor:
    """Attention of (batch, length, heads, dim) tensors."""
    lengths = given.keys if given.lengths_on_device is None else given.lengths_on_device
    places: dict[str, Any] = {"cache_seqlens": lengths, "first_position": given.first_position}
    if given.places is not None:
        places |= {name: numbers.to(q.device) for name, numbers in given.places.items()}
    mask = given.mask
    if given.first_position and isinstance(mask, Causal):  # the one query attends to what is left, also in Moshi, which has no window
        mask = Window(given.keys - 1, 0)
    out: Tensor = flash_attn_with_kvcache(q, k, v, **places, **_mask_arguments(mask), **options)
    return out


def _mask_arguments(mask: Mask | Tensor) -> dict[str, Any]:
    if isinstance(mask, Tensor) or mask.sides is None:
        raise NotImplementedError(f"dash_attn takes a cache that dropped keys with a full or causal mask or a window; got {mask}")
    return {"window_size": mask.sides}


def kept_implementation() -> Iterator[Change]:
    """transformers lets continuous batching run with implementations that it knows, and would replace ours or refuse it. Earlier versions
    would run it with other bits."""
    try:
        from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
    except ImportError:  # a version without it, or without what it needs
        return
    early = numbers(installed("transformers") or "") < numbers(LEAST_WITH_PAGES)
    name = "__init__" if early else "switch_to_cb_friendly_attn"
    original = getattr(ContinuousBatchingManager, name, None)
    if original is None or getattr(original, "keeps_dash_attn", False):  # older versions refuse implementations that they do not know
        return

    @wraps(original)
    def changed(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        ours = model.config._attn_implementation in (NAME, f"paged|{NAME}")
        if ours and early:
            check_library("transformers", "generate_batch with dash_attn", LEAST_WITH_PAGES)
        if early or not ours:
            original(self, model, *args, **kwargs)

    changed.keeps_dash_attn = True  # type: ignore[attr-defined]
    yield Change(ContinuousBatchingManager, name, changed)


def attend_to_pages(
    module: nn.Module, tensors: tuple[Tensor, ...], given: LayerMask, arguments: dict[str, Any], options: dict[str, Any]
) -> Tensor:
    """Attention of the requests of a batch, (1, heads, tokens, dim) -> (1, tokens, heads, dim). `arguments` are transformers'."""
    query, key, value = tensors
    if given.windows is None:
        raise NotImplementedError(
            f"dash_attn takes causal masks and windows in continuous batching; {type(module).__name__} has {given.mask}"
        )
    if arguments.get("block_table") is not None:
        raise NotImplementedError("dash_attn lets the cache gather its pages in continuous batching: set max_blocks_per_request=0")
    (window,) = given.windows
    key, value = _from_pages(module, key, value, arguments, "full_attention" if window is None else "sliding_attention")
    offsets = offsets_of_arguments(arguments)
    assert offsets is not None, "continuous batching always gives them"
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if window is not None and offsets.max_seqlen_k >= window:
        firsts = _first_positions(offsets, arguments.get("position_ids"), window)
        if any(firsts):
            return _one_by_one((q, k, v), offsets, firsts, {"window_size": (window - 1, 0), **options})[None]
    mask = Causal() if window is None else Window(window - 1, 0)
    out: Tensor = flash_attn_varlen_func(q, k, v, **offsets.named(), mask=mask, **options)
    return out[None]


def _from_pages(module: nn.Module, key: Tensor, value: Tensor, arguments: dict[str, Any], kind: str) -> tuple[Tensor, Tensor]:
    """The keys and values of all requests, (1, heads, tokens, dim). What `arguments` say of lengths becomes this layer's."""
    cache, layer = arguments["cache"], module.layer_idx
    if arguments.get(OLDER[0]) is None:
        found: tuple[Tensor, Tensor] = cache.update(key_states=key, value_states=value, layer_idx=layer, kwargs=arguments)
        return found
    # transformers before 5.19 has other names, and lengths for each kind of layers where there are two
    indices = {name: arguments[name] for name in ("read_index", "write_index")}
    key, value = cache.update(key_states=key, value_states=value, layer_idx=layer, **indices)
    lengths = {"cu_seq_lens_k": arguments["cu_seq_lens_k"], "max_length_k": arguments[OLDER[1]]}
    arguments |= {name: given[kind] if isinstance(given, dict) else given for name, given in lengths.items()}
    arguments["max_length_q"] = arguments[OLDER[0]]
    return key.transpose(0, 1)[None], value.transpose(0, 1)[None]


def _first_positions(offsets: SequenceOffsets, positions: Tensor | None, window: int) -> list[int]:
    """Of the first key of each request. It is not 0 where the cache dropped keys: the last position tells how many there were."""
    if positions is None:
        raise NotImplementedError(f"dash_attn needs position_ids to tell which keys a cache with a window of {window} dropped; got none")
    lengths_q, lengths_k = offsets.cu_seqlens_q.diff(), offsets.cu_seqlens_k.diff()
    last = positions[0][(offsets.cu_seqlens_q[1:] - 1).clamp(min=0).long()]
    firsts: list[int] = torch.where(lengths_q > 0, last + 1 - lengths_k, 0).tolist()
    return firsts


def _one_by_one(tokens: tuple[Tensor, Tensor, Tensor], offsets: SequenceOffsets, firsts: list[int], options: dict[str, Any]) -> Tensor:
    """Packed sequences count positions from their first key, so requests that dropped keys get a call each."""
    q, k, v = tokens
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    for first, (rows, keys) in zip(firsts, offsets.sequences(len(q), len(k)), strict=True):
        if rows.start < rows.stop:
            one: Tensor = flash_attn_with_kvcache(q[None, rows], k[None, keys], v[None, keys], first_position=first, **options)
            out[rows] = one[0]
    return out
