"""Hugging Face transformers: `enable()`, then models take `attn_implementation="dash_attn"`.

transformers asks once per forward for a mask (`mask_for`) and hands the answer to every layer's attention
(`attention`). The answer is an object of ours, with the documents' offsets where a batch is packed, and the rows' where it is
padded. What we have no mask for raises, as does a model whose attention does not go through here; nothing is dropped silently.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.autocast import under_autocast
from ..attention.functions import flash_attn_func
from ..attention.varlen import flash_attn_varlen_func
from ..call.offsets import SequenceOffsets
from ..masks import Causal, Full, Mask, Window
from ._cached_keys import attend_to_cache, goes_to_cache
from ._call_arguments import refuse_contradiction, refuse_dropout_with_cache, refuse_unknown
from ._continuous_batching import FOR_THE_CACHE, attend_to_pages, kept_implementation
from ._documents import ON_THE_HOST, PositionReader, are_noted, given_documents, offsets_of_arguments, offsets_of_indices
from ._door import Change, Door
from ._layer_mask import NAME, LayerMask
from ._mask_functions import is_bidirectional, is_causal, is_plain_window, read_causal, read_chunks
from ._mask_patterns import mask_of_pattern
from ._model_check import check, checks_of_models, note_call, watched_model
from ._padding import Padding, is_known_whole, kept_columns, places_in_cache, places_of_all_keys, refuse_beside
from ._tensor_parallel import first_kv_head
from ._torch_context_parallel import refuse_inside

__all__ = ["NAME", "attention", "check", "disable", "enable", "mask_for"]
_positions = PositionReader()


DOOR = Door("huggingface")


def enable() -> AbstractContextManager[object]:
    """Make "dash_attn" an attention implementation of transformers, also in models loaded before: until `disable()`, or with this as a
    context manager inside its block.

    Models that are built with it are checked: one whose attention does not go through dash_attn raises when it is
    built, or at its first forward.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    tables = ((AttentionInterface, attention), (AttentionMaskInterface, mask_for))
    return DOOR.open(*(Change(table._global_mapping, NAME, ours) for table, ours in tables), *checks_of_models(), *kept_implementation())


def disable() -> None:
    """transformers does not know "dash_attn" any more, however often `enable()` was called. Models that have it raise."""
    DOOR.close()


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
    dropout: of the weights, with seeds from PyTorch's generator, one per sequence or document.
    Of a cache's keys those in use are attended (`_cached_keys.py`).
    Documents are kept apart that cu_seq_lens_q (with its companions) or the mask show. Where neither a 2-d attention_mask
    nor transformers has decided, position_ids show them: a document starts where positions go back, as a rule to 0.
    """
    note_call()
    layer = type(module).__name__
    paged = kwargs.get("cache") is not None
    refuse_unknown({name: value for name, value in kwargs.items() if not paged or name not in FOR_THE_CACHE}, layer)
    given = _mask_without_one(module, query, key, is_causal, sliding_window) if attention_mask is None else attention_mask
    if not isinstance(given, LayerMask):
        raise ValueError(
            f"dash_attn takes the masks it makes itself; {layer} got a {type(given).__name__}."
            " Pass a 2-d attention_mask or None, and pack documents with position_ids"
        )
    given.check(query.shape[2], key.shape[2])
    options: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
    if paged:
        refuse_dropout_with_cache(dropout, layer)
        return attend_to_pages(module, under_autocast(query, key, value), given, kwargs, options), None
    refuse_contradiction(given.mask, given.first_position + given.keys, is_causal, sliding_window)
    q, k, v = (x.transpose(1, 2) for x in under_autocast(query, key, value))  # as eager's matrix products would be
    k, v = k[:, given.first_key :], v[:, given.first_key :]
    offsets = _packed_offsets(given, len(query), kwargs)
    if offsets is None and goes_to_cache(q, k, v, given, s_aux):
        refuse_dropout_with_cache(dropout, layer)
        return attend_to_cache(q, k, v, given, options), None
    if offsets is None and given.padding is not None:
        offsets = given.padding.offsets(type(module))
    k, v = k[:, : given.keys], v[:, : given.keys]
    options |= {"mask": given.mask, "head_offset": first_kv_head(module, key.shape[1]), "dropout_p": dropout}
    if offsets is None:
        return flash_attn_func(q, k, v, **options), None
    offsets = offsets.on(q.device)  # layers of one model may be on several devices, and nobody moves our mask
    out = flash_attn_varlen_func(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), **offsets.named(), **options)
    return out.unflatten(0, q.shape[:2]), None


def _packed_offsets(given: LayerMask, batch: int, arguments: dict[str, Any]) -> SequenceOffsets | None:
    """Of documents, where the batch is packed."""
    noted, handed = given.noted, {name: value for name, value in arguments.items() if value is not None}
    looks_ahead = isinstance(given.mask, Full) or (isinstance(given.mask, Window) and given.mask.right != 0)
    arguments = handed if looks_ahead else {**noted, **handed}
    offsets = offsets_of_arguments(arguments) or given.offsets
    if offsets is None and "cu_seq_lens_q" in noted and noted["tokens"] in (None, batch * given.keys):
        raise ValueError(f"dash_attn would mix documents: {given.model} was given cu_seq_lens_q, and a layer that looks ahead was not")
    if offsets is None and "position_ids" in arguments and not given.documents_are_known and not looks_ahead:
        offsets = _positions.offsets(arguments["position_ids"], batch, given.first_position + given.keys)
    if offsets is not None and noted.get("has_cache"):
        raise NotImplementedError("dash_attn does not support packed documents with a cache, whose next tokens would attend all of them")
    if offsets is not None and not isinstance(given.mask, (Full, Causal, Window)):
        raise NotImplementedError(
            f"dash_attn supports documents with causal, bidirectional and sliding-window masks; this one is {given.mask}"
        )
    return offsets if offsets is None or given.padding is None else refuse_beside(given.padding, offsets)


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
    """kv_len: with keys that a cache dropped."""
    return Causal() if window is None or window >= kv_len else Window(window - 1, 0)


def mask_for(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | LayerMask | None = None,
    **kwargs: Any,
) -> LayerMask:
    """The mask that `mask_function` describes. Never None: code that is not ours would read that as "attend everything"."""
    if isinstance(attention_mask, LayerMask):  # `generate` made it ahead
        attention_mask.check(q_length, kv_length)
        return attention_mask
    sizes, offsets = (batch_size, q_length, kv_length), (q_offset, kv_offset)
    if torch.compiler.is_compiling() and (attention_mask is None or are_noted() or not _is_traceable(mask_function, offsets, kwargs)):
        return _made_on_the_host(sizes, offsets, mask_function, attention_mask, kwargs)
    return _made(sizes, offsets, mask_function, attention_mask, kwargs)


def _is_traceable(mask_function: Callable[..., Tensor] | None, offsets: tuple[Any, Any], arguments: dict[str, Any]) -> bool:
    """Whether the mask can be told without values, and without what a function of this program has captured but numbers."""
    if arguments.get("use_vmap") or not all(isinstance(offset, int) for offset in offsets):
        return False
    if mask_function is None or is_causal(mask_function) or is_bidirectional(mask_function):
        return True
    return is_plain_window(mask_function, arguments)


def _made(
    sizes: tuple[int, int, int],
    starts: tuple[int, int],
    mask_function: Callable[..., Tensor] | None,
    attention_mask: Tensor | None,
    arguments: dict[str, Any],
) -> LayerMask:
    refuse_inside('attn_implementation="dash_attn"')
    if arguments.get("use_vmap"):
        raise NotImplementedError("dash_attn does not support masks made of the caller's own functions")
    starts = int(starts[0]), int(starts[1])
    made = _described_mask(mask_function, sizes, starts, arguments.get("device"))
    if attention_mask is not None:
        _add_padding(made, attention_mask, sizes, starts[1] + made.first_key)
    if are_noted():
        made.noted = given_documents()
    made.documents_are_known |= attention_mask is not None and "position_ids" not in made.noted  # with them it is the model's own
    made.model = watched_model() or f"the model of a {type(arguments.get('config')).__name__}"
    return made


def _add_padding(made: LayerMask, attention_mask: Tensor, sizes: tuple[int, int, int], first: int) -> None:
    """first: the column of the first key."""
    batch, q_len, _ = sizes
    kept = kept_columns(attention_mask, batch, made.keys, first)
    if first and made.windows is None and not bool(attention_mask[:, : first + made.keys].all()):
        raise NotImplementedError("dash_attn does not support padding with chunked attention: lay the documents end to end in one row")
    if not is_known_whole(kept, made.mask):
        made.padding = Padding(kept, q_len, made.mask)
    if made.padding is not None and q_len == 1 and isinstance(made.mask, Full):
        made.places = places_of_all_keys(kept)
    elif made.first_position or (made.padding is not None and q_len == 1):  # what a cache dropped may have been padding
        made.places = places_in_cache(attention_mask, q_len, first, first + made.keys)


_made_on_the_host: Callable[..., LayerMask] = torch.compiler.disable(_made, reason=ON_THE_HOST)


def _described_mask(
    mask_function: Callable[..., Tensor] | None, sizes: tuple[int, int, int], offsets: tuple[int, int], device: Any
) -> LayerMask:
    batch, q_len, kv_len = sizes
    if mask_function is not None and is_bidirectional(mask_function):
        return LayerMask(Full(), (q_len, kv_len))
    keys, first = offsets[0] + q_len - offsets[1], offsets[1]
    chunk = None if mask_function is None or is_causal(mask_function) else read_chunks(mask_function)
    if chunk is not None and offsets[0] // chunk == (offsets[0] + q_len - 1) // chunk:
        return _mask_of_chunk(offsets[0] // chunk * chunk, sizes, offsets)
    known = (None, None) if mask_function is None else read_causal(mask_function)
    if keys > kv_len or (keys < kv_len and known is None):
        why = "" if keys > kv_len else ". A static cache has slots behind the last query: with this mask, use a dynamic cache"
        raise NotImplementedError(
            f"dash_attn needs the last query at the last key; got positions {first + keys - 1} and {first + kv_len - 1}{why}"
        )
    if known is None:
        assert mask_function is not None
        return LayerMask(mask_of_pattern(_on_indices(mask_function, *offsets, device), batch, q_len, kv_len), (q_len, kv_len))
    window, documents = known
    made = LayerMask(_plain_mask(first + keys, window), (q_len, kv_len), None if documents is None else offsets_of_indices(documents))
    made.keys, made.first_position, made.windows = keys, first, (window,)
    if keys < kv_len:  # a static cache: its length goes to a kernel as a tensor, so that a graph can be replayed
        made.lengths_on_device = torch.full((batch,), keys, dtype=torch.int32, device=device)
    return made


def _mask_of_chunk(start: int, sizes: tuple[int, int, int], offsets: tuple[int, int]) -> LayerMask:
    """Queries of one chunk attend what it has so far. To the bits it is a sequence of its own, as where a forward has many chunks."""
    made = LayerMask(Causal(), sizes[1:])
    made.first_key, made.keys = start - offsets[1], offsets[0] + sizes[1] - start
    return made


def _on_indices(mask_function: Callable[..., Tensor], q_offset: int, kv_offset: int, device: Any) -> Callable[[int, range, range], Tensor]:
    """The mask function on a rectangle of one sequence, as a boolean matrix."""

    def rectangle(sequence: int, rows: range, columns: range) -> Tensor:
        row = torch.arange(rows.start, rows.stop, device=device)[:, None] + q_offset
        column = torch.arange(columns.start, columns.stop, device=device)[None, :] + kv_offset
        kept = mask_function(torch.tensor(sequence, device=device), torch.tensor(0, device=device), row, column)
        return kept.expand(len(rows), len(columns))

    return rectangle
