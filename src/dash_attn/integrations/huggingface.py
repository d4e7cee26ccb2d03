"""Hugging Face transformers: `enable()`, then models take `attn_implementation="dash_attn"`.

transformers asks once per forward for a mask (`mask_for`) and hands the answer to every layer's attention
(`attention`). The answer is an object of ours, with the documents' offsets where a batch is packed, and the rows' where it is
padded. What we have no mask for raises, as does a model whose attention does not go through here; nothing is dropped silently.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..attention.autocast import under_autocast
from ..attention.functions import flash_attn_func
from ..attention.varlen import flash_attn_varlen_func
from ..call.offsets import SequenceOffsets
from ..door import Change, Door, refuse_unknown
from ..libraries import check_library
from ..masks import Causal, Documents, Full, Mask, Window
from ._caches import FOR_THE_CACHE, attend_to_cache, attend_to_pages, goes_to_cache, kept_implementation
from ._documents import OFFSETS, ON_THE_HOST, PositionReader, are_noted, given_documents, offsets_of_arguments, offsets_of_indices
from ._layer_mask import (
    NAME,
    LayerMask,
    Padding,
    kept_columns,
    known_padding,
    places_in_cache,
    places_of_all_keys,
    refuse_behind_padding,
    refuse_beside,
)
from ._mask_functions import (
    MaskFunction,
    Pattern,
    has_documents,
    is_plain,
    is_plain_window,
    mask_of_pattern,
    matrix_of,
    read_causal,
    read_chunks,
)
from ._model_check import check, checks_of_models, note_call, watched_model
from ._torch_context_parallel import has_placement, refuse_inside

__all__ = ["NAME", "attention", "check", "disable", "enable", "mask_for"]
# What layers pass to an attention function: what is used, what says nothing, and what is refused.
USED = ("position_ids", *OFFSETS)
# Known to say nothing about what is attended, or how; each with the reason.
WITHOUT_EFFECT = {
    "use_cache": "the layer has joined the cache's keys to its own before it calls",
    "cache_position": "the mask says where the queries are",
    "past_key_values": "as use_cache",
    "deterministic": "a switch of flash-attn; attention here is always deterministic",
    "output_hidden_states": "the model collects them",
    "output_router_logits": "for the experts' layers",
    "return_dict": "for the model's answer",
    "num_items_in_batch": "for the loss",
    "logits_to_keep": "for the last layer",
    "seq_idx": "for state-space layers; position_ids or cu_seq_lens_q come with it and tell the documents",
}
ONLY_FALSE = ("output_attentions",)  # the weights are never there to give
KEY_PROJECTIONS = ("k_proj", "kv_b_proj", "key", "qkv_proj", "query_key_value")  # of which the keys' heads are the rows, in order
_positions = PositionReader()
PAGED = f"paged|{NAME}"  # as continuous batching of older versions names implementations
DOOR = Door("integrations.huggingface")


def enable() -> AbstractContextManager[object]:
    """Make "dash_attn" an attention implementation of transformers, also in models loaded before: until `disable()`, or with this as a
    context manager inside its block.

    Models that are built with it are checked: one whose attention does not go through dash_attn raises when it is
    built, or at its first forward.
    """
    check_library("transformers", f"dash_attn.{DOOR.module}")
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    tables = ((AttentionInterface, attention), (AttentionMaskInterface, mask_for))
    names = (NAME, PAGED) if "paged|sdpa" in AttentionInterface._global_mapping else (NAME,)  # later versions take off the prefix
    named = (Change(table._global_mapping, name, ours) for table, ours in tables for name in names)
    return DOOR.open(*named, *checks_of_models(), *kept_implementation())


def disable() -> None:
    """Removes "dash_attn" from transformers, however often `enable()` was called. Models that use it then raise."""
    DOOR.close()


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LayerMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of (batch, heads, length, dim) tensors -> (batch, length, heads, dim).

    attention_mask: what `mask_for` returned, or a matrix of the caller's, 4-d, boolean or of 0 and -inf. Without one every query
    attends to every key, and the layer must say that it is not causal (`is_causal=False`, or the module's).
    s_aux: attention sinks, one logit per query head.
    dropout: of the weights, with seeds from PyTorch's generator, one per sequence or document.
    Of a cache's keys those in use are attended (`_caches.py`).
    Documents are kept apart that cu_seq_lens_q (with its companions) or the mask show. Where neither a 2-d attention_mask
    nor transformers has decided, position_ids show them: a document starts where positions go back, as a rule to 0.
    """
    note_call()
    layer = type(module).__name__
    paged = kwargs.get("cache") is not None
    false = tuple(name for name in ONLY_FALSE if kwargs.get(name) is False)
    refuse_unknown("dash_attn", kwargs, (*USED, *WITHOUT_EFFECT, *false, *(FOR_THE_CACHE if paged else ())), f"which {layer} was given")
    if attention_mask is None:
        given = _mask_without_one(module, query, key, is_causal, sliding_window)
    else:
        given = attention_mask if isinstance(attention_mask, LayerMask) else _mask_of_the_caller(attention_mask, layer, query.shape[2])
    given.check(query.shape[2], key.shape[2])
    options: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
    if paged:
        _refuse_dropout_with_cache(dropout, layer)
        return attend_to_pages(module, under_autocast(query, key, value), given, kwargs, options), None
    _refuse_contradiction(given.mask, given.keys + given.first_position * (given.windows is not None), is_causal, sliding_window)
    q, k, v = (x.transpose(1, 2) for x in under_autocast(query, key, value))  # as eager's matrix products would be
    k, v = k[:, given.first_key :], v[:, given.first_key :]
    offsets = _packed_offsets(given, len(query), kwargs)
    if offsets is None and goes_to_cache(q, k, v, given, s_aux):
        _refuse_dropout_with_cache(dropout, layer)
        return attend_to_cache(q, k, v, given, options), None
    if offsets is None and given.padding is not None:
        offsets = given.padding.offsets(type(module))
    k, v = k[:, : given.keys], v[:, : given.keys]
    mask = given.mask
    if isinstance(mask, Tensor):
        mask, k, v = _from_position_0(mask.to(q.device), k, v, given.first_position)
    options |= {"mask": mask, "head_offset": first_kv_head(module, key.shape[1]), "dropout_p": dropout}
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
        raise NotImplementedError("dash_attn does not support packed documents with a cache, whose next tokens would attend to all of them")
    if offsets is not None and isinstance(given.mask, Documents) and given.offsets is None:
        _check_chunks(given.mask, offsets)
        return None
    if offsets is not None and not isinstance(given.mask, (Full, Causal, Window)):
        raise NotImplementedError(
            f"dash_attn supports documents with causal, bidirectional and sliding-window masks; this one is {given.in_words}. A matrix"
            " keeps documents apart by itself: leave cu_seq_lens_q out"
        )
    return offsets if offsets is None or given.padding is None else refuse_beside(given.padding, offsets)


def _check_chunks(mask: Documents, offsets: SequenceOffsets) -> None:
    """Chunked attention: the mask has the chunks of each document, if transformers has seen the documents. Of every row of the batch."""
    wanted = offsets.cu_seqlens_q.tolist()
    ends = {0, *accumulate(mask.lengths * (wanted[-1] // sum(mask.lengths)))}
    if not set(wanted) <= ends:
        raise NotImplementedError(
            "dash_attn keeps documents apart under chunked attention where transformers counts the chunks from the start of each: give"
            " position_ids, use_cache=False and no attention_mask beside cu_seq_lens_q"
        )


def _mask_without_one(module: nn.Module, query: Tensor, key: Tensor, is_causal: bool | None, sliding_window: int | None) -> LayerMask:
    """A layer without a mask attends to everything, as eager attention does: vision towers, cross attention."""
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if sliding_window is not None or (causal is not False and query.shape[2] > 1):
        raise ValueError(
            f"dash_attn got no mask from {type(module).__name__} (is_causal={causal}, sliding_window={sliding_window});"
            " without one every query attends to every key, which only a layer with is_causal=False and no sliding_window can mean"
        )
    return LayerMask(Full(), (query.shape[2], key.shape[2]))


def _mask_of_the_caller(matrix: Any, layer: str, q_len: int) -> LayerMask:
    """Models hand a 4-d attention_mask on as it is."""
    if not isinstance(matrix, Tensor) or matrix.ndim != 4:
        got = f"a {matrix.ndim}-d tensor" if isinstance(matrix, Tensor) else f"a {type(matrix).__name__}"
        raise ValueError(
            f"dash_attn takes an attention_mask that is 2-d, 4-d (batch, heads or 1, queries or 1, keys) or None; {layer} got {got}"
        )
    made = LayerMask(matrix, (q_len if matrix.shape[2] == 1 else matrix.shape[2], matrix.shape[3]))
    made.documents_are_known = True
    if are_noted():
        made.noted = given_documents()
    return made


def _from_position_0(mask: Tensor, k: Tensor, v: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where a cache dropped keys, with others in their place that nobody attends: KV tiles are cut by position."""
    if not first:
        return mask, k, v
    k, v = (functional.pad(x, (0, 0, 0, 0, first, 0)) for x in (k, v))
    return functional.pad(mask, (first, 0)), k, v


def _refuse_dropout_with_cache(dropout: float, layer: str) -> None:
    if dropout:
        raise ValueError(
            f"dash_attn has no attention dropout for keys of a cache; {layer} asks for {dropout}. Call model.eval() to generate, or"
            " set it to 0 in the configuration (attention_dropout, attn_pdrop, attention_probs_dropout_prob)"
        )


def _refuse_contradiction(mask: Mask | Tensor, kv_len: int, is_causal: bool | None, sliding_window: int | None) -> None:
    """Eager attention goes by the mask alone, others by these arguments. Where they disagree nobody can be right."""
    if is_causal is False and isinstance(mask, Causal):
        raise ValueError(
            "dash_attn got is_causal=False with a causal mask. Set is_causal in the model's configuration, which makes the mask"
        )
    if sliding_window is not None and sliding_window < kv_len and isinstance(mask, Causal):
        raise ValueError(f"dash_attn got sliding_window={sliding_window} with a causal mask that has no window")


def first_kv_head(module: nn.Module, kv_heads: int) -> int:
    """The index, in the whole model, of the first KV head of a layer that has `kv_heads` of them here. 0 without a plan."""
    for name in KEY_PROJECTIONS:
        weight: Any = getattr(getattr(module, name, None), "weight", None)
        if weight is not None and has_placement(weight):
            return _first_row(weight) * kv_heads // int(weight.to_local().shape[0])
    return 0


def _first_row(weight: Any) -> int:
    """Of this rank's rows. Every rank has as many as the first, as far as there are some left."""
    first, rows = 0, weight.shape[0]
    for size, place, placement in zip(weight.device_mesh.shape, weight.device_mesh.get_coordinate(), weight.placements, strict=True):
        if placement.is_shard(0):
            rows = -(-rows // size)
            first += place * rows
    return first


class _Asked(NamedTuple):
    """What transformers asks for: the mask that `function` describes, for queries from position q_offset and keys from kv_offset on."""

    batch: int
    q_len: int
    kv_len: int
    q_offset: int
    kv_offset: int
    function: MaskFunction | None
    arguments: dict[str, Any]

    def is_traceable(self) -> bool:
        """Whether the mask can be told without values, and without what a function of this program has captured but numbers."""
        if self.arguments.get("use_vmap") or not (isinstance(self.q_offset, int) and isinstance(self.kv_offset, int)):
            return False
        if self.function is None or is_plain(self.function, "causal") or is_plain(self.function, "bidirectional"):
            return True
        return is_plain_window(self.function, self.arguments)

    def matrix(self, attention_mask: Tensor | None) -> Tensor:
        """The mask function on all of them, with what is padded."""
        places = {"batch_size": self.batch, "q_length": self.q_len, "kv_length": self.kv_len}
        return matrix_of(self.function, attention_mask, self.arguments, **places, q_offset=self.q_offset, kv_offset=self.kv_offset)

    def pattern(self) -> Pattern:
        """Without what is padded. A function that does not take many places at once makes the whole matrix."""
        if not self.arguments.get("use_vmap"):
            return self.rectangle
        matrix = self.matrix(None)
        return lambda sequence, rows, columns: matrix[sequence, 0, rows.start : rows.stop, columns.start : columns.stop]

    def rectangle(self, sequence: int, rows: range, columns: range) -> Tensor:
        """The mask function on a rectangle of one sequence, as a boolean matrix."""
        assert self.function is not None
        device = self.arguments.get("device")
        row = torch.arange(rows.start, rows.stop, device=device)[:, None] + self.q_offset
        column = torch.arange(columns.start, columns.stop, device=device)[None, :] + self.kv_offset
        kept: Tensor = self.function(torch.tensor(sequence, device=device), torch.tensor(0, device=device), row, column)
        return kept.expand(len(rows), len(columns))


def mask_for(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | LayerMask | None = None,
    **kwargs: Any,
) -> LayerMask:
    """The mask that `mask_function` describes. Never None: code that is not ours would read that as "attend to everything"."""
    if isinstance(attention_mask, LayerMask):  # `generate` made it ahead
        attention_mask.check(q_length, kv_length)
        return attention_mask
    asked = _Asked(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, kwargs)
    if torch.compiler.is_compiling() and (attention_mask is None or are_noted() or not asked.is_traceable()):
        return _made_on_the_host(asked, attention_mask)
    return _made(asked, attention_mask)


def _made(asked: _Asked, attention_mask: Tensor | None) -> LayerMask:
    refuse_inside('attn_implementation="dash_attn"')
    asked = asked._replace(q_offset=int(asked.q_offset), kv_offset=int(asked.kv_offset))
    if 0 in (asked.batch, asked.q_len, asked.kv_len):  # nobody attends anything, and there is no pattern to read
        return LayerMask(Full(), (asked.q_len, asked.kv_len))
    made = _described_mask(asked)
    if made is None or (attention_mask is not None and not _add_padding(made, attention_mask, asked)):
        if attention_mask is not None and asked.q_offset:
            refuse_behind_padding(attention_mask, asked.q_offset)
        made = LayerMask(asked.matrix(attention_mask), (asked.q_len, asked.kv_len), first_position=asked.kv_offset)
        made.documents_are_known = has_documents(asked.function)
    made.as_matrix = partial(asked.matrix, attention_mask)
    if are_noted():
        made.noted = given_documents()
    made.documents_are_known |= attention_mask is not None and "position_ids" not in made.noted  # with them it is the model's own
    made.model = watched_model() or f"the model of a {type(asked.arguments.get('config')).__name__}"
    return made


_made_on_the_host: Callable[..., LayerMask] = torch.compiler.disable(_made, reason=ON_THE_HOST)


def _add_padding(made: LayerMask, attention_mask: Tensor, asked: _Asked) -> bool:
    """False where the mask with its padding is none that has a name, as far as the host knows."""
    first = asked.kv_offset + made.first_key  # the column of the first key
    kept = kept_columns(attention_mask, asked.batch, made.keys, first)
    if first and made.windows is None and not bool(attention_mask[:, : first + made.keys].all()):  # chunks before
        return False
    padding = known_padding(kept, made.mask)
    if padding == "holes":
        return False
    if padding != "none":
        made.padding = Padding(kept, asked.q_len, made.mask)
    if made.padding is not None and asked.q_len == 1 and isinstance(made.mask, Full):
        made.places = places_of_all_keys(kept)
    elif made.first_position or (made.padding is not None and asked.q_len == 1):  # what a cache dropped may have been padding
        made.places = places_in_cache(attention_mask, asked.q_len, first, first + made.keys)
        return padding == "unknown" or not bool((made.places["cache_leftpad"] < 0).any())
    return True


def _described_mask(asked: _Asked) -> LayerMask | None:
    """None if no mask by name is the one that is asked for."""
    function, lengths = asked.function, (asked.q_len, asked.kv_len)
    if function is not None and is_plain(function, "bidirectional"):
        return LayerMask(Full(), lengths)
    end, first = asked.q_offset + asked.q_len, asked.kv_offset  # positions: behind the last query, and of the first key
    chunk = None if function is None or is_plain(function, "causal") else read_chunks(function)
    if chunk is not None and asked.q_offset // chunk == (end - 1) // chunk:
        # Queries of one chunk attend what it has so far. To the bits it is a sequence of its own, as where a forward has many chunks.
        start = asked.q_offset // chunk * chunk
        return LayerMask(Causal(), lengths, keys=end - start, first_key=start - first)
    if chunk is not None and asked.q_offset:
        raise NotImplementedError(
            f"dash_attn takes a part of a prompt that ends in the chunk of attention in which it begins, or a whole prompt; chunks have"
            f" {chunk} tokens, and got positions {asked.q_offset} to {end - 1}"
        )
    known = (None, None) if function is None else read_causal(function)
    keys = end - first
    if known is None:
        mask_by_name = mask_of_pattern(asked.pattern(), asked.batch, *lengths)
        return None if mask_by_name is None or (first and asked.q_len > 1) else LayerMask(mask_by_name, lengths, first_position=first)
    if keys > asked.kv_len:
        raise NotImplementedError(f"dash_attn needs the last query at the last key; got positions {end - 1} and {first + asked.kv_len - 1}")
    window, documents = known
    mask = Causal() if window is None or window >= end else Window(window - 1, 0)
    made = LayerMask(mask, lengths, None if documents is None else offsets_of_indices(documents), keys, first_position=first)
    made.windows = (window,)
    if keys < asked.kv_len:  # a static cache: its length goes to a kernel as a tensor, so that a graph can be replayed
        made.lengths_on_device = torch.full((asked.batch,), keys, dtype=torch.int32, device=asked.arguments.get("device"))
    return made
