"""What `mask_for` gives to every layer of a model: never None and never a tensor, so that no other code can use it as a mask.

Rows of a batch that are padded, left or right, become packed sequences: in place, and without the host reading the mask.
A 2-d attention_mask keeps one stretch of each row. The stretches are sequences. What lies between two stretches is two sequences
more: queries without keys, whose output is 0, and keys without queries, whose gradients are 0. So all tokens of the batch lie end
to end, and the kernels of packed sequences need to know nothing of padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from typing import Any, ClassVar, Literal, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from ..call.offsets import NO_OFFSETS, SequenceOffsets
from ..masks import Causal, Full, Mask, Window

# What the forward of a layer may take without a second source of states. With one, the mask may be that of other tokens than the queries.
OF_ITSELF = {
    *("self", "hidden_states", "attention_mask", "position_embeddings", "position_ids", "past_key_values", "cache_position"),
    *("output_attentions", "use_cache", "kwargs"),
}


def kept_columns(attention_mask: Tensor, batch: int, kv_len: int, kv_offset: int) -> Tensor:
    """Which keys are not padding, (batch, keys)."""
    shape = tuple(attention_mask.shape)
    if len(shape) != 2 or shape[0] != batch or shape[1] < kv_offset + kv_len:
        raise ValueError(
            f"dash_attn needs a 2-d attention_mask with a row for each of the {batch} sequences and a column for each of the"
            f" {kv_offset + kv_len} tokens up to the last key; got shape {shape}"
        )
    return attention_mask[:, kv_offset : kv_offset + kv_len].to(torch.bool)


def known_padding(kept: Tensor, mask: Mask | Tensor) -> Literal["none", "stretches", "holes", "unknown"]:
    """What is padded, as far as the host may look. "holes" also where rows of this mask cannot be packed sequences."""
    served = isinstance(mask, (Full, Causal, Window))
    if torch.compiler.is_compiling() or (served and kept.device.type != "cpu"):
        return "unknown"
    if bool(kept.all()):
        return "none"
    return "stretches" if served and bool(_stretches(kept)[2]) else "holes"


def refuse_behind_padding(attention_mask: Tensor, q_offset: int) -> None:
    """Tokens that go on from a padded place, whose own output is 0: a prompt that is padded on the right."""
    before, queries = attention_mask[:, :q_offset].to(torch.bool), attention_mask[:, q_offset:].to(torch.bool)
    behind = before.any(1) & ~before[:, -1] & queries.any(1)
    if bool(behind.any()):
        row = int(behind.nonzero()[0])
        raise ValueError(
            f"dash_attn cannot go on from padding: row {row} of the attention_mask keeps tokens, then none up to column {q_offset - 1}, and"
            " new ones behind it. Pad prompts on the left"
        )


class Padding:
    """Which tokens are padding. The device knows, so what follows from it is computed there, once per forward.

    kept: (batch, keys).
    """

    def __init__(self, kept: Tensor, q_len: int, mask: Mask | Tensor) -> None:
        self.kept = kept
        self._rows = self._keys = None
        if _looks_back(mask) or q_len == kept.shape[1]:
            self._rows = _offsets(kept, q_len, itself=True)
        if isinstance(mask, Full):
            self._keys = _offsets(kept, q_len, itself=False)
        self._surely_itself = _looks_back(mask)

    def offsets(self, layer: type) -> SequenceOffsets:
        """Causal layers attend to themselves. Other ones may attend to the padded tokens of another model part: then all queries count."""
        if self._rows is not None and (self._surely_itself or attends_itself(layer)):
            return self._rows
        if self._keys is None:
            raise NotImplementedError(
                f"dash_attn supports padding under a window that looks ahead where a layer attends to its own tokens only; {layer.__name__}"
                " may attend to others"
            )
        return self._keys


def places_in_cache(attention_mask: Tensor, q_len: int, first: int, end: int) -> dict[str, Tensor]:
    """Under a mask that looks back, for a cache that has the tokens from column `first` to `end`, the queries last: the slot of each
    row's first key, and the position of that key, as flash_attn_with_kvcache takes them. A row whose one query is padding has no keys.
    Where holes or queries are padding that would matter, a slot is -1, and is refused: the host may not have looked for them."""
    kept = attention_mask[:, :end].to(torch.bool)
    left, _, known = _stretches(kept)
    if q_len == 1:
        left = torch.where(kept[:, -1], left, end)
    else:
        known = known & kept[:, -q_len:].all()
    slots = torch.where(known, (left - first).clamp(min=0), -1)
    return {"cache_leftpad": slots.to(torch.int32), "first_position": (first - left).clamp(min=0).to(torch.int32)}


def places_of_all_keys(kept: Tensor) -> dict[str, Tensor]:
    """Under a full mask: the slot of each row's first key, and the end of its keys. The query may be none of their tokens, as in cross
    attention, so that no column says anything about it."""
    first, end, known = _stretches(kept)
    return {"cache_leftpad": torch.where(known, first, -1).to(torch.int32), "cache_seqlens": end.to(torch.int32)}


def refuse_beside(padding: Padding, offsets: SequenceOffsets) -> SequenceOffsets:
    """Offsets that the caller gave. They say nothing of padding, so there must not be any."""
    return _valid_if(padding.kept.all(), offsets)


def _looks_back(mask: Mask | Tensor) -> bool:
    return isinstance(mask, Causal) or (isinstance(mask, Window) and mask.right == 0)


@cache
def attends_itself(layer: type) -> bool:
    """Whether a layer's keys are surely those of its queries, going by what its forward takes."""
    return set(signature(layer.forward).parameters) <= OF_ITSELF  # type: ignore[attr-defined]


attends_itself._dynamo_marked_constant = True  # type: ignore[attr-defined] # as in attention/pytorch.py


def _offsets(kept: Tensor, q_len: int, itself: bool) -> SequenceOffsets:
    """Per row: the queries before, the keys before, the sequence. At last, those behind.

    itself: rows attend to themselves, and the queries are the last `q_len` of the keys' tokens. If not, the queries are other tokens, none
    of them padded.
    """
    first, end, known = _stretches(kept)
    earlier, (batch, kv_len) = kept.shape[1] - q_len, kept.shape
    rows = torch.arange(batch, device=kept.device)
    q_first, q_end = ((x - earlier).clamp(0, q_len) + rows * q_len for x in (first, end)) if itself else (rows * q_len, (rows + 1) * q_len)
    k_first, k_end = first + rows * kv_len, end + rows * kv_len
    k_before = functional.pad(k_end, (1, 0))  # ends of the rows before
    q_all, k_all = (torch.full_like(k_before[:1], batch * length) for length in (q_len, kv_len))
    cu_q = [torch.zeros_like(q_all), torch.stack([q_first, q_first, q_end], 1).flatten(), q_all, q_all]
    cu_k = [torch.zeros_like(k_all), torch.stack([k_before[:-1], k_first, k_end], 1).flatten(), k_before[-1:], k_all]
    longest = 2 * q_len, 2 * kv_len  # what is between two sequences belongs to two rows
    return _valid_if(known, SequenceOffsets(torch.cat(cu_q).to(torch.int32), torch.cat(cu_k).to(torch.int32), *longest))


def _stretches(kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First and end of what each row keeps, both at the row's end where that is nothing; and whether no row has holes."""
    length = kept.shape[1]
    columns = torch.arange(length, device=kept.device)
    first = torch.where(kept, columns, length).amin(1)
    end = torch.maximum(first, torch.where(kept, columns + 1, 0).amax(1))
    return first, end, (end - first == kept.sum(1)).all()


def _valid_if(known: Tensor, offsets: SequenceOffsets) -> SequenceOffsets:
    """The offsets, if the device finds this true."""
    cu_q, cu_k = (torch.where(known, ends, NO_OFFSETS) for ends in (offsets.cu_seqlens_q, offsets.cu_seqlens_k))
    return SequenceOffsets(cu_q, cu_k, offsets.max_seqlen_q, offsets.max_seqlen_k)


NAME = "dash_attn"  # our attn_implementation
ANOTHER_IMPLEMENTATION = 'use attn_implementation="eager" or "sdpa" for this model'


class ForeignUse(AttributeError, TypeError):
    """Code other than dash_attn tried to use our mask. Both bases, so that `hasattr` and operators see what they expect."""


@dataclass(slots=True, eq=False, repr=False)
class LayerMask:
    """A mask and the lengths it is for, with the documents' offsets where the batch is packed.

    Where no mask by name says what is attended, it is a matrix: (batch, heads or 1, queries, keys), padding included.
    """

    mask: Mask | Tensor
    lengths: tuple[int, int]
    offsets: SequenceOffsets | None = None
    keys: int = -1  # how many of the keys that a layer gets are attended; -1 for all. A static cache has slots behind them
    first_key: int = 0  # where they begin among those. Chunked attention does not look at the chunks before
    first_position: int = 0  # that of the first of them. A cache of a window dropped those before
    lengths_on_device: Tensor | None = None  # `keys` as a tensor with one number per sequence, where the cache is static
    windows: tuple[int | None] | None = None  # of a causal mask, its window, or None without one; None if nothing of the kind is known
    documents_are_known: bool = False  # False where nothing has said yet whether rows hold documents, so that position_ids may
    noted: dict[str, Any] = field(default_factory=dict)  # what the model was given that tells documents (`_documents.py`)
    padding: Padding | None = None  # of rows that may be padded
    places: dict[str, Tensor] | None = None  # of such rows in a cache; None if keys are from slot 0 and first_position on
    as_matrix: Callable[[], Tensor] | None = None  # the same with its padding, for models that put two masks side by side
    model: str = "this model"  # the name of the configuration it was made for, for messages
    ndim: ClassVar[int] = 4  # transformers asks whether it has made this mask already: of four dimensions it has

    def __post_init__(self) -> None:
        self.keys = self.lengths[1] if self.keys < 0 else self.keys
        self.documents_are_known = self.offsets is not None

    def contiguous(self) -> LayerMask:
        """`generate` lays out masks that it makes ahead, for static caches."""
        return self

    def check(self, q_len: int, kv_len: int) -> None:
        """Raise if a layer has other lengths than the mask was made for: the pattern would be shifted."""
        if self.lengths != (q_len, kv_len):
            raise NotImplementedError(
                f"dash_attn has a mask of {self.lengths[0]} queries and {self.lengths[1]} keys for {self.model};"
                f" a layer has {q_len} queries and {kv_len} keys"
            )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """transformers reads the keys off it where a model hands the mask to a part of itself."""
        return 1, 1, *self.lengths

    @property
    def in_words(self) -> str:
        return "a matrix" if isinstance(self.mask, Tensor) else str(self.mask)

    def __repr__(self) -> str:
        return f"<mask of dash_attn: {self.in_words}, {self.lengths[0]} queries, {self.lengths[1]} keys>"

    def __getitem__(self, index: Any) -> LayerMask:
        """Models cut a mask to the length of the keys. A cut that keeps all is the mask itself."""
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) == 4 and all(isinstance(part, slice) and part.start in (None, 0) and part.step in (None, 1) for part in parts):
            stops = [part.stop for part in parts]
            if stops[:2] == [None, None] and all(stop is None or stop >= n for stop, n in zip(stops[2:], self.lengths, strict=True)):
                return self
        _refuse(self.model, "cuts it")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # copy, pickle and numpy ask for methods that we do not have
            raise AttributeError(name)
        _refuse(self.model, f"asks for its .{name}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        if func is torch.cat and (kwargs or {}).get("dim") == -1:  # self and cross attention in one (T5Gemma 2)
            matrices = [mask.as_matrix for mask in args[0] if isinstance(mask, LayerMask) and mask.as_matrix is not None]
            if len(matrices) == len(args[0]):
                joined: Tensor = torch.cat([matrix() for matrix in matrices], dim=-1)
                return joined
        found = next((given for given in (*args, *(kwargs or {}).values()) if isinstance(given, LayerMask)), None)
        _refuse("this model" if found is None else found.model, f"calls {getattr(func, '__name__', func)} on it")


def _refuse(model: str, what: str) -> NoReturn:
    raise ForeignUse(
        f"dash_attn's mask is not a tensor, and {model} {what}: its attention code is its own and does not go through dash_attn;"
        f" {ANOTHER_IMPLEMENTATION}"
    )


def _operator(name: str) -> Any:
    def refuse(self: LayerMask, *others: Any) -> NoReturn:
        _refuse(self.model, f"applies {name} to it")

    return refuse


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
_OPERATORS = (
    *(f"__{side}{name}__" for name in _BINARY for side in ("", "r", "i")),
    *("__neg__", "__pos__", "__invert__", "__abs__", "__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"),
    *("__bool__", "__len__", "__iter__", "__float__", "__int__", "__index__", "__setitem__", "__contains__"),
)
for _name in _OPERATORS:
    setattr(LayerMask, _name, _operator(_name))
LayerMask.__hash__ = object.__hash__  # type: ignore[method-assign]
