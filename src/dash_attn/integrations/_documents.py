"""Documents packed in the rows of a batch, as transformers describes them, become offsets for flash_attn_varlen_func.

cu_seq_lens_q and its companions tell them, or position_ids without a mask. Not every model hands that on to its attention, and some make
a mask of ones of their own. So it is noted at the model's door, for as long as its forward runs, and `mask_for` asks for it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import wraps
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..call.offsets import SequenceOffsets
from ._layer_mask import NAME

SAY_IT = "Pass a 2-d attention_mask of ones if each row is one document; cu_seq_lens_q and its companions if not"
OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
ON_THE_HOST = (
    "dash_attn reads position_ids and masks made of functions on the host, once per forward. A model of transformers traces whole where"
    " a 2-d attention_mask says that each row is one document: pass one, of ones where nothing is padded, or compile it without"
    " fullgraph=True"
)


def offsets_of_arguments(arguments: dict[str, Any]) -> SequenceOffsets | None:
    """From transformers' cu_seq_lens_q and its companions, which come together or not at all."""
    given = [name for name in OFFSETS if arguments.get(name) is not None]
    if not given:
        return None
    if len(given) < len(OFFSETS):
        raise ValueError(f"packed documents need all of {', '.join(OFFSETS)}; got only {', '.join(given)}")
    q, k, longest_q, longest_k = (arguments[name] for name in OFFSETS)
    return SequenceOffsets(q.to(torch.int32), k.to(torch.int32), int(longest_q), int(longest_k))


def offsets_of_indices(documents: Tensor) -> SequenceOffsets:
    """From the number of each token's document, (batch, length)."""
    return _offsets_of_starts(documents.diff(dim=1, prepend=documents[:, :1] - 1) != 0)


class PositionReader:
    """The documents that position_ids count through. Every layer asks with the same tensor, so the last answer is kept."""

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[Tensor], tuple[int, int, int], SequenceOffsets | None] | None = None

    def offsets(self, positions: Tensor, batch: int, kv_len: int) -> SequenceOffsets | None:
        """None if each row is one document."""
        if positions.is_inference():  # those do not count their changes
            return _offsets_of_positions(positions, batch, kv_len)
        key, last = (positions._version, batch, kv_len), self._last  # once: another thread may change it
        if last is not None and last[0]() is positions and last[1] == key:
            return last[2]
        found = _offsets_of_positions(positions, batch, kv_len)
        self._last = weakref.ref(positions), key, found
        return found


def _offsets_of_positions(positions: Tensor, batch: int, kv_len: int) -> SequenceOffsets | None:
    """Documents that count up one by one from where positions go back (or stay at 0: a document of one token).

    Positions that never go back are one document, whatever they skip. Anything between is refused: it may be either.
    """
    if positions.ndim not in (2, 3) or positions.shape[-1] < 2:
        return None
    if positions.ndim == 3:  # in time, height and width, or also in the text, which comes first; within a document no first row goes back
        if bool((positions[0].diff(dim=1) < 0).any()):
            raise ValueError(f"dash_attn cannot tell documents by position_ids that go back and are {len(positions)} per token. {SAY_IT}")
        return None
    if len(positions) not in (1, batch):
        raise ValueError(
            f"dash_attn needs position_ids of one row, or one for each of the {batch} sequences; got shape {tuple(positions.shape)}"
        )
    steps = positions.diff(dim=1)
    if bool((steps > 0).all()):
        return None
    starts = (steps < 0) | (positions[:, 1:] == 0)
    if not bool(((steps == 1) | starts).all()) or bool(starts.all()):
        raise ValueError(f"dash_attn cannot tell documents by position_ids that repeat, or skip and go back. {SAY_IT}")
    if positions.shape[1] != kv_len:
        raise NotImplementedError("dash_attn does not support packed documents after keys of a cache: pass use_cache=False")
    return _offsets_of_starts(torch.cat([torch.ones_like(starts[:, :1]), starts], 1).expand(batch, -1))


def _offsets_of_starts(starts: Tensor) -> SequenceOffsets:
    starts = starts.clone()
    starts[:, 0] = True  # no document goes over the end of a row
    ends = [*starts.flatten().nonzero()[:, 0].tolist(), starts.numel()]
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=starts.device)
    longest = max(end - start for start, end in pairwise(ends))
    return SequenceOffsets(cu_seqlens, cu_seqlens, longest, longest)


class InThisThread(threading.local):
    """What belongs to the models whose forward runs in this thread, the innermost last."""

    def __init__(self) -> None:
        self.open: list[Any] = []


_notes = InThisThread()


def given_documents() -> dict[str, Any]:
    """What the models that run in this thread were given, by the names of the arguments. The innermost one's counts; but a cache may be
    one that a model made for its parts."""
    if not _notes.open:
        return {}
    merged = {name: value for note in _notes.open for name, value in note.items()}
    return merged | {"has_cache": _notes.open[0]["has_cache"]}


def are_noted() -> bool:
    """A question that can be traced."""
    return bool(_notes.open)


def noting_documents(original: Callable[..., Any]) -> Callable[..., Any]:
    """A forward of a model that notes what it is given."""
    places = {name: place - 1 for place, name in enumerate(signature(original).parameters)}  # without self

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        documents = _documents(self, places, args, kwargs) if self.config._attn_implementation == NAME else {}
        if not documents:
            return original(self, *args, **kwargs)
        _note(documents)
        try:
            return original(self, *args, **kwargs)
        finally:
            _forget()

    return forward


def _documents(model: Any, places: dict[str, int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """And whether a cache was given, and how many tokens: parts of the model may have others, as a vision tower has."""

    def given(name: str) -> Any:
        if name in kwargs:
            return kwargs[name]
        return args[places[name]] if places.get(name, len(args)) < len(args) else None

    if model.config.is_encoder_decoder and "position_ids" not in places and given("position_ids") is not None:
        raise ValueError(f"dash_attn cannot tell whose position_ids these are: {type(model).__name__} does not take them by name")
    names = OFFSETS if given("attention_mask") is not None else (*OFFSETS, "position_ids")
    found = {name: value for name in names if (value := given(name)) is not None}
    if found:
        tokens = given("input_ids") if given("inputs_embeds") is None else given("inputs_embeds")[..., 0]
        found |= {"tokens": None if tokens is None else tokens.numel(), "has_cache": given("past_key_values") is not None}
    return found


_note: Callable[[dict[str, Any]], None] = torch.compiler.disable(lambda documents: _notes.open.append(documents), reason=ON_THE_HOST)
_forget: Callable[[], object] = torch.compiler.disable(lambda: _notes.open.pop(), reason=ON_THE_HOST)
