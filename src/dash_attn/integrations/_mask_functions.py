"""What transformers' mask functions are made of, read off instead of evaluated on every pair of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import getclosurevars
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

MaskFunction = Callable[..., Any]


def read_causal(mask_function: MaskFunction) -> tuple[int | None, Tensor | None] | None:
    """(window, numbers of the documents) of a causal mask function; None if it has parts that are not known here."""
    from transformers.masking_utils import causal_mask_function

    causal, window, documents, by_position = False, None, None, False
    for part in _parts(mask_function):
        name, value = _known(part)
        if part is causal_mask_function:
            causal = True
        elif name == "by position":
            by_position = True
        elif name == "window" and window is None:
            window = value
        elif name == "documents" and documents is None:
            documents = value
        else:
            return None
    # Inside a document positions rise one by one, so that to compare them is to compare places. Without documents it may be another mask.
    return (window, documents) if causal and by_position <= (documents is not None) else None


read_causal._dynamo_marked_constant = True  # type: ignore[attr-defined] # as in attention/pytorch.py; asked after is_plain_window


def is_causal(mask_function: MaskFunction) -> bool:
    from transformers.masking_utils import causal_mask_function

    return mask_function is causal_mask_function


def is_bidirectional(mask_function: MaskFunction) -> bool:
    from transformers.masking_utils import bidirectional_mask_function

    return mask_function is bidirectional_mask_function


def is_plain_window(mask_function: MaskFunction, arguments: dict[str, Any]) -> bool:
    """Whether it has captured numbers and known functions only, going by what came with it. A program that is traced cannot look
    into it, unless that is so."""
    from transformers.masking_utils import and_masks

    config, window = arguments.get("config"), arguments.get("local_size")
    if not isinstance(window, int) or getattr(config, "attention_chunk_size", None) is not None:
        return False
    return mask_function.__code__ is and_masks().__code__ and window == getattr(config, "sliding_window", None)


def read_chunks(mask_function: MaskFunction) -> int | None:
    """The size of the chunks that a causal mask function keeps apart (Llama 4); None if it is another."""
    from transformers.masking_utils import causal_mask_function, chunked_overlay

    sizes = []
    for part in _parts(mask_function):
        inside = _closure_of(part, like=chunked_overlay(1, torch.zeros(1)))
        if inside is not None:
            sizes.append(int(inside["chunk_size"]))
        elif part is not causal_mask_function:
            return None
    return sizes[0] if len(sizes) == 1 else None


read_chunks._dynamo_marked_constant = True  # type: ignore[attr-defined] # as read_causal


def _parts(mask_function: MaskFunction) -> Iterator[MaskFunction]:
    """The functions whose intersection this is. One that asks another by positions comes before it."""
    from transformers.masking_utils import and_masks

    inside = _closure_of(mask_function, like=and_masks())
    if inside is None:
        yield mask_function
    for part in _asked_by_position(mask_function) if inside is None else inside["mask_functions"]:
        yield from _parts(part)


def _asked_by_position(part: MaskFunction) -> list[MaskFunction]:
    """What transformers asks for the positions of two tokens instead of their places, from 5.23 on."""
    from transformers import masking_utils

    remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
    inside = None if remap is None else _closure_of(part, like=remap(None, None))
    return [] if inside is None else [inside["mask_function"]]


def _known(part: MaskFunction) -> tuple[str, Any]:
    from transformers.masking_utils import packed_sequence_mask_function, sliding_window_overlay

    inside = _closure_of(part, like=sliding_window_overlay(1))
    if inside is not None:
        return "window", inside["sliding_window"]
    inside = _closure_of(part, like=packed_sequence_mask_function(torch.zeros(1, 1)))
    if inside is not None:
        return "documents", inside["packed_sequence_mask"]
    return ("by position" if _asked_by_position(part) else "unknown"), None


def _closure_of(function: MaskFunction, like: MaskFunction) -> dict[str, Any] | None:
    """The variables a function has captured, if it was made by the same code as `like`."""
    if isinstance(function, FunctionType) and isinstance(like, FunctionType) and function.__code__ is like.__code__:
        return dict(getclosurevars(function).nonlocals)
    return None
