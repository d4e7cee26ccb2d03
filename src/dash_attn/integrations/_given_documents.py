"""What a model was given that tells the documents in a row: cu_seq_lens_q and its companions, or position_ids without a mask.

Not every model hands that on to its attention, and some make a mask of ones of their own. So it is noted at the model's door, for as
long as its forward runs, and `mask_for` asks for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

import torch

from ._documents import OFFSETS
from ._layer_mask import NAME

ON_THE_HOST = (
    "dash_attn reads position_ids and masks made of functions on the host, once per forward. A model of transformers traces whole where"
    " a 2-d attention_mask says that each row is one document: pass one, of ones where nothing is padded, or compile it without"
    " fullgraph=True"
)


class _Notes(threading.local):
    """Of the models whose forward runs in this thread, the innermost last."""

    def __init__(self) -> None:
        self.open: list[dict[str, Any]] = []


_notes = _Notes()


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


def note_documents(model: type) -> None:
    """Every call of this model's forward notes what it is given, also one that goes past the hooks. Once is enough."""
    from transformers import PreTrainedModel

    for part in model.__mro__:
        original = vars(part).get("forward")
        if issubclass(part, PreTrainedModel) and original is not None and not getattr(original, "notes_documents", False):
            part.forward = _noting(original)  # type: ignore[attr-defined]


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
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

    forward.notes_documents = True  # type: ignore[attr-defined]
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
