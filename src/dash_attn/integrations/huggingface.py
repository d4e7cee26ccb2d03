"""Hugging Face transformers: `register()`, then models take `attn_implementation="dash_attn"`.

transformers asks once per forward for a mask (`mask_for`) and hands the answer to every layer's attention
(`attention`). The answer is an object of ours, with the documents' offsets where a batch is packed. What we have no mask
for raises, as does a model whose attention does not go through here; nothing is dropped silently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.autocast import under_autocast
from ..attention.functions import flash_attn_func
from ..attention.varlen import flash_attn_varlen_func
from ..call.offsets import SequenceOffsets
from ..masks import Causal, Full, Mask, Window
from ._call_arguments import refuse_contradiction, refuse_dropout, refuse_unknown
from ._documents import PositionReader, offsets_of_arguments, offsets_of_indices
from ._first_forward import note_call, watched_model
from ._layer_mask import NAME, LayerMask
from ._mask_functions import read_causal
from ._mask_patterns import mask_of_pattern
from ._model_check import check, watch_models
from ._torch_context_parallel import refuse_inside

__all__ = ["NAME", "attention", "check", "mask_for", "register"]
ON_THE_HOST = (
    "dash_attn reads masks and position_ids on the host, once per forward, so a model of transformers does not trace whole:"
    " compile it without fullgraph=True"
)
_positions = PositionReader()


def register() -> None:
    """Make "dash_attn" an attention implementation of transformers, here and in models loaded before.

    Models that are built with it are checked: one whose attention does not go through dash_attn raises when it is
    built, or at its first forward.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, torch.compiler.disable(mask_for, reason=ON_THE_HOST))
    watch_models()


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LayerMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of (batch, heads, length, dim) tensors -> (batch, length, heads, dim).

    attention_mask: what `mask_for` returned. Without one every query attends every key, and the layer must say that it is
    not causal (`is_causal=False`, or the module's).
    s_aux: attention sinks, one logit per query head.
    Documents are kept apart that cu_seq_lens_q (with its companions) or the mask show. Where neither a 2-d attention_mask
    nor transformers has decided, position_ids show them: a document starts where positions go back, as a rule to 0.
    """
    note_call()
    layer = type(module).__name__
    refuse_unknown(kwargs, layer)
    refuse_dropout(dropout, layer)
    given = _mask_without_one(module, query, key, is_causal, sliding_window) if attention_mask is None else attention_mask
    if not isinstance(given, LayerMask):
        raise ValueError(
            f"dash_attn takes the masks it makes itself; {layer} got a {type(given).__name__}."
            " Pass a 2-d attention_mask of ones or None, and pack documents with position_ids"
        )
    mask, offsets = _mask_and_offsets(given, query, key, kwargs)
    refuse_contradiction(mask, key.shape[2], is_causal, sliding_window)
    options: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap or 0.0, "mask": mask, "sinks": s_aux}
    q, k, v = (x.transpose(1, 2) for x in under_autocast(query, key, value))  # as eager's matrix products would be
    if offsets is None:
        return flash_attn_func(q, k, v, **options), None
    options |= {field.name: getattr(offsets, field.name) for field in fields(offsets)}
    out = flash_attn_varlen_func(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), **options)
    return out.unflatten(0, q.shape[:2]), None


def _mask_and_offsets(given: LayerMask, query: Tensor, key: Tensor, arguments: dict[str, Any]) -> tuple[Mask, SequenceOffsets | None]:
    """The mask, and the offsets of documents where the batch is packed."""
    given.check(query.shape[2], key.shape[2])
    offsets = offsets_of_arguments(arguments) or given.offsets
    positions = arguments.get("position_ids")
    if offsets is None and positions is not None and not given.documents_are_known and not isinstance(given.mask, Full):
        offsets = _positions.offsets(positions, len(query), key.shape[2])
    return given.mask, offsets


def _mask_without_one(module: nn.Module, query: Tensor, key: Tensor, is_causal: bool | None, sliding_window: int | None) -> LayerMask:
    """A layer without a mask attends everything, as eager attention does: vision towers, cross attention."""
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if sliding_window is not None or (causal is not False and query.shape[2] > 1):
        raise ValueError(
            f"dash_attn got no mask from {type(module).__name__} (is_causal={causal}, sliding_window={sliding_window});"
            " without one every query attends every key, which only a layer with is_causal=False and no sliding_window can mean"
        )
    return LayerMask(Full(), (query.shape[2], key.shape[2]))


def _plain_mask(kv_len: int, window: int | None) -> Mask:
    return Causal() if window is None or window >= kv_len else Window(window - 1, 0)


def mask_for(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> LayerMask:
    """The mask that `mask_function` describes. Never None: code that is not ours would read that as "attend everything"."""
    refuse_inside('attn_implementation="dash_attn"')
    if kwargs.get("use_vmap"):
        raise NotImplementedError("dash_attn does not support masks made of the caller's own functions")
    offsets = int(q_offset), int(kv_offset)
    made = _described_mask(mask_function, (batch_size, q_length, kv_length), offsets, kwargs.get("device"))
    _refuse_padding(attention_mask, kv_length)  # after the alignment: a static cache has keys that the mask does not cover
    made.documents_are_known |= attention_mask is not None
    made.model = watched_model() or f"the model of a {type(kwargs.get('config')).__name__}"
    return made


def _described_mask(
    mask_function: Callable[..., Tensor] | None, sizes: tuple[int, int, int], offsets: tuple[int, int], device: Any
) -> LayerMask:
    from transformers.masking_utils import bidirectional_mask_function

    batch, q_len, kv_len = sizes
    if mask_function is bidirectional_mask_function:
        return LayerMask(Full(), (q_len, kv_len))
    last_query, last_key = offsets[0] + q_len - 1, offsets[1] + kv_len - 1
    if last_query != last_key:
        raise NotImplementedError(
            f"dash_attn needs the last query at the last key; got positions {last_query} and {last_key}. A static cache has keys after"
            " the last query: use a dynamic cache"
        )
    known = (None, None) if mask_function is None else read_causal(mask_function)
    if known is None:
        assert mask_function is not None
        return LayerMask(mask_of_pattern(_on_indices(mask_function, *offsets, device), batch, q_len, kv_len), (q_len, kv_len))
    window, documents = known
    return LayerMask(_plain_mask(kv_len, window), (q_len, kv_len), None if documents is None else offsets_of_indices(documents))


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
