"""Continuous batching of transformers (`generate_batch`): requests of any lengths in one packed batch, their keys in pages.

The cache writes the new keys into its pages and gathers those of every request, end to end. Where a key lay does not matter to its
bits; where its sequence begins does, so a cache of a window that dropped keys is refused.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.varlen import flash_attn_varlen_func
from ..call.offsets import SequenceOffsets
from ..masks import Causal, Window
from ._documents import offsets_of_arguments
from ._layer_mask import NAME, LayerMask

# What the model is given for the cache, and not for us.
FOR_THE_CACHE = ("cache", "read_index", "write_index", "block_table", "logits_indices", "logits_processor_args")


def keep_implementation() -> None:
    """transformers lets continuous batching run with implementations that it knows, and would replace ours or refuse it."""
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

    original = getattr(ContinuousBatchingManager, "switch_to_cb_friendly_attn", None)
    if original is None or getattr(original, "keeps_dash_attn", False):  # older versions refuse implementations that they do not know
        return

    @wraps(original)
    def switch_to_cb_friendly_attn(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if model.config._attn_implementation != NAME:
            original(self, model, *args, **kwargs)

    switch_to_cb_friendly_attn.keeps_dash_attn = True  # type: ignore[attr-defined]
    ContinuousBatchingManager.switch_to_cb_friendly_attn = switch_to_cb_friendly_attn


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
    key, value = arguments["cache"].update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=arguments)
    offsets = offsets_of_arguments(arguments)
    assert offsets is not None, "continuous batching always gives them"
    if window is not None and offsets.max_seqlen_k >= window:
        _refuse_dropped_keys(offsets, arguments.get("position_ids"), window)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    mask = Causal() if window is None else Window(window - 1, 0)
    ends = offsets.cu_seqlens_q, offsets.cu_seqlens_k, offsets.max_seqlen_q, offsets.max_seqlen_k
    out: Tensor = flash_attn_varlen_func(q, k, v, *ends, mask=mask, **options)
    return out[None]


def _refuse_dropped_keys(offsets: SequenceOffsets, positions: Tensor | None, window: int) -> None:
    """A request whose last position is not its number of keys has lost some."""
    lengths_q, lengths_k = offsets.cu_seqlens_q.diff(), offsets.cu_seqlens_k.diff()
    if positions is None:
        raise NotImplementedError(f"dash_attn needs position_ids to tell whether a cache with a window of {window} dropped keys; got none")
    last = positions[0][(offsets.cu_seqlens_q[1:] - 1).clamp(min=0).long()] + 1
    dropped = torch.where(lengths_q > 0, last - lengths_k, 0)
    if bool((dropped != 0).any()):
        raise NotImplementedError(
            f"dash_attn has no continuous batching past a sliding window, here of {window} keys: the cache dropped {int(dropped.max())}"
            " keys and does not say so. Use generate, whose caches do"
        )
