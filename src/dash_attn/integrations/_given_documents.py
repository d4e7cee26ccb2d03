"""What a model was given that tells the documents in a row: cu_seq_lens_q and its companions, or position_ids without a mask.

Not every model hands that on to its attention, and some make a mask of ones of their own. So it is noted at the model's door, for as
long as its forward runs, and `mask_for` asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from threading import get_ident
from typing import Any

import torch

from ._documents import OFFSETS
from ._layer_mask import NAME

ON_THE_HOST = (
    "dash_attn reads position_ids and masks made of functions on the host, once per forward. A model of transformers traces whole where"
    " a 2-d attention_mask says that each row is one document: pass one, of ones where nothing is padded, or compile it without"
    " fullgraph=True"
)


class _Note:
    def __init__(self, documents: dict[str, Any]) -> None:
        self.thread, self.documents = get_ident(), documents


_notes: list[_Note] = []  # of all threads, the innermost model last. A program that is traced asks only whether there are some


def are_noted() -> bool:
    """Whether a model in any thread was given documents: a question that can be traced."""
    return bool(_notes)


def given_documents() -> dict[str, Any]:
    """What the models that run in this thread were given, by the names of the arguments. The innermost one's counts."""
    mine = get_ident()
    return {name: value for note in list(_notes) if note.thread == mine for name, value in note.documents.items()}


def note_documents(model: type) -> None:
    """Every call of this class's forward notes what it is given, also one that goes past the hooks. Once is enough."""
    original = model.forward  # type: ignore[attr-defined]
    if getattr(original, "notes_documents", False):
        return
    places = {name: place - 1 for place, name in enumerate(signature(original).parameters)}  # without self

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        documents = _documents(places, args, kwargs) if self.config._attn_implementation == NAME else {}
        if not documents:
            return original(self, *args, **kwargs)
        note = _note(documents)
        try:
            return original(self, *args, **kwargs)
        finally:
            _forget(note)

    forward.notes_documents = True  # type: ignore[attr-defined]
    model.forward = forward  # type: ignore[attr-defined]


def _documents(places: dict[str, int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = OFFSETS if _argument("attention_mask", places, args, kwargs) is not None else (*OFFSETS, "position_ids")
    found = {name: _argument(name, places, args, kwargs) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _argument(name: str, places: dict[str, int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name in kwargs:
        return kwargs[name]
    return args[places[name]] if places.get(name, len(args)) < len(args) else None


def _append(documents: dict[str, Any]) -> _Note:
    note = _Note(documents)
    _notes.append(note)
    return note


_note: Callable[[dict[str, Any]], _Note] = torch.compiler.disable(_append, reason=ON_THE_HOST)
_forget: Callable[[_Note], None] = torch.compiler.disable(lambda note: _notes.remove(note), reason=ON_THE_HOST)
