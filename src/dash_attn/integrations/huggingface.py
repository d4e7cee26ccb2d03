"""Hugging Face transformers: `register()`, then models take `attn_implementation="dash_attn"`.

transformers asks once a forward for a mask (`mask_for`) and hands the answer to every layer's attention
(`attention`). The answer is a mask of dash_attn.masks, with the documents' places where a batch is packed. What we have
no mask for raises; nothing is dropped silently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from ..api import flash_attn_func
from ..masks import Causal, Full, Mask, Window
from ..packing import Packing
from ..varlen import flash_attn_varlen_func
from ._documents import PackedDocuments, PositionReader, packing_of_arguments, packing_of_indices
from ._mask_functions import read_causal
from ._mask_patterns import mask_of_pattern

NAME = "dash_attn"
UNSUPPORTED = ("position_bias", "cache", "head_mask")
_positions = PositionReader()


def register() -> None:
    """Make "dash_attn" an attention implementation of transformers, here and in models loaded before."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask_for)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | PackedDocuments | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of (batch, heads, length, dim) tensors -> (batch, length, heads, dim).

    attention_mask: what `mask_for` returned. Without one, `is_causal` (or the module's) and `sliding_window` decide.
    s_aux: attention sinks, a logit a query head.
    Documents are kept apart that cu_seq_lens_q (with its companions), the mask or else position_ids show, also where
    transformers did not look for them.
    """
    unsupported = [name for name in UNSUPPORTED if kwargs.get(name) is not None]
    if unsupported or kwargs.get("output_attentions"):
        raise ValueError(f"dash_attn does not support {', '.join(unsupported) or 'output_attentions=True'}")
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        attention_mask = _plain_mask(key.shape[2], causal, sliding_window)
    mask, packing = _mask_and_places(attention_mask, query, key, kwargs)
    options: dict[str, Any] = {"dropout_p": dropout, "softmax_scale": scaling, "softcap": softcap or 0.0, "mask": mask, "sinks": s_aux}
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if packing is None:
        return flash_attn_func(q, k, v, **options), None
    options |= {field.name: getattr(packing, field.name) for field in fields(packing)}
    out = flash_attn_varlen_func(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), **options)
    return out.unflatten(0, q.shape[:2]), None


def _mask_and_places(given: Any, query: Tensor, key: Tensor, arguments: dict[str, Any]) -> tuple[Mask, Packing | None]:
    """The mask, and the places of documents where the batch is packed."""
    packing = packing_of_arguments(arguments)
    if isinstance(given, PackedDocuments):
        return given.mask, packing or given.packing
    if not isinstance(given, Mask):
        raise ValueError("dash_attn takes no mask tensors; pass a 2-d attention_mask of ones or None, and pack documents with position_ids")
    positions = arguments.get("position_ids")
    if packing is None and positions is not None and isinstance(given, (Causal, Window)) and query.shape[2] == key.shape[2]:
        packing = _positions.packing(positions, len(query))
    return given, packing


def _plain_mask(kv_len: int, causal: bool, sliding_window: int | None) -> Mask:
    if sliding_window is None or sliding_window >= kv_len:
        return Causal() if causal else Full()
    return Window(sliding_window - 1, 0 if causal else sliding_window - 1)


def mask_for(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Mask | PackedDocuments | None:
    """The mask that `mask_function` describes; None for plain causal attention, as transformers expects."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    _refuse_padding(attention_mask, kv_length)
    if kwargs.get("use_vmap"):
        raise NotImplementedError("dash_attn does not support masks made of the caller's own functions")
    if mask_function is bidirectional_mask_function:
        return Full()
    last_query, last_key = int(q_offset) + q_length - 1, int(kv_offset) + kv_length - 1
    if last_query != last_key:
        raise NotImplementedError(f"dash_attn needs the last query at the last key; got positions {last_query} and {last_key}")
    if mask_function is None or mask_function is causal_mask_function:
        return None
    known = read_causal(mask_function)
    if known is not None:
        window, documents = known
        mask = _plain_mask(kv_length, True, window)
        return mask if documents is None else PackedDocuments(mask, packing_of_indices(documents))
    shifted = _on_indices(mask_function, int(q_offset), int(kv_offset), kwargs.get("device"))
    return mask_of_pattern(shifted, batch_size, q_length, kv_length)


def _refuse_padding(padding: Tensor | None, kv_length: int) -> None:
    if padding is None:
        return
    padding = padding[:, -kv_length:]
    if padding.shape[1] != kv_length or not padding.all():
        raise ValueError(
            "dash_attn does not support padding: attention_mask must be all ones or None."
            " Lay the documents end to end in one row, with position_ids that start at 0 in each"
        )


def _on_indices(mask_function: Callable[..., Tensor], q_offset: int, kv_offset: int, device: Any) -> Callable[[int, range, range], Tensor]:
    """The mask function on a rectangle of one sequence, as a boolean matrix."""

    def rectangle(sequence: int, rows: range, columns: range) -> Tensor:
        row = torch.arange(rows.start, rows.stop, device=device)[:, None] + q_offset
        column = torch.arange(columns.start, columns.stop, device=device)[None, :] + kv_offset
        kept = mask_function(torch.tensor(sequence, device=device), torch.tensor(0, device=device), row, column)
        return kept.expand(len(rows), len(columns))

    return rectangle
