"""Which of our masks a mask function of transformers is: read off what it is made of, or else off its pattern. Others are matrices.

The pattern is read in blocks of rows, so memory stays linear in the length.
"""

from collections.abc import Callable, Iterator
from inspect import getclosurevars
from types import FunctionType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..masks import Causal, Documents, Full, IntervalMask, Prefix, Window

MaskFunction = Callable[..., Any]
Pattern = Callable[[int, range, range], Tensor]  # (sequence, rows, columns) -> boolean matrix
Bounds = tuple[NDArray[np.int64], NDArray[np.int64]]
ROWS = 256


def read_causal(mask_function: MaskFunction) -> tuple[int | None, Tensor | None] | None:
    """(window, numbers of the documents) of a causal mask function; None if it has parts that are not known here."""
    found = _read(mask_function)
    if "causal" not in found or not found.keys() <= {"causal", "window", "documents", "by position"}:
        return None
    # Inside a document positions rise one by one, so that to compare them is to compare places. Without documents it may be another mask.
    return None if "by position" in found and "documents" not in found else (found.get("window"), found.get("documents"))


def has_documents(mask_function: MaskFunction | None) -> bool:
    """Whether transformers has put documents into a mask function, whatever its other parts are."""
    return mask_function is not None and "documents" in _read(mask_function)


def read_chunks(mask_function: MaskFunction) -> int | None:
    """The size of the chunks that a causal mask function keeps apart (Llama 4); None if it is another."""
    found = _read(mask_function)
    return int(found["chunks"]) if "chunks" in found and found.keys() <= {"causal", "chunks"} else None


# As in attention/pytorch.py; asked after is_plain_window.
read_causal._dynamo_marked_constant = True  # type: ignore[attr-defined]
read_chunks._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_plain(mask_function: MaskFunction, kind: str) -> bool:
    """kind: "causal" or "bidirectional". By names: a program that is traced cannot import transformers' modules (PyTorch 2.11)."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    return mask_function is (causal_mask_function if kind == "causal" else bidirectional_mask_function)


def is_plain_window(mask_function: MaskFunction, arguments: dict[str, Any]) -> bool:
    """Whether it has captured numbers and known functions only, going by what came with it. A program that is traced cannot look
    into it, unless that is so."""
    from transformers.masking_utils import and_masks

    config, window = arguments.get("config"), arguments.get("local_size")
    if not isinstance(window, int) or getattr(config, "attention_chunk_size", None) is not None:
        return False
    return mask_function.__code__ is and_masks().__code__ and window == getattr(config, "sliding_window", None)


def _read(mask_function: MaskFunction) -> dict[str, Any]:
    """What an intersection of functions has captured, by the names of `_makers`. "unknown": of a function that is none of them, or
    a second one of its name."""
    found: dict[str, Any] = {}
    rest = [mask_function]
    while rest:
        name, value = _part(rest.pop())
        if name == "all of":
            rest += value
            continue
        if name == "by position":
            rest.append(value)
        elif name in found and value is not None:
            name = "unknown"
        found[name] = value
    return found


def _part(function: MaskFunction) -> tuple[str, Any]:
    if is_plain(function, "causal"):
        return "causal", None
    for name, like, variable in _makers():
        if isinstance(function, FunctionType) and function.__code__ is like.__code__:
            return name, getclosurevars(function).nonlocals[variable]
    return "unknown", None


def _makers() -> Iterator[tuple[str, Any, str]]:
    """Of each function of transformers that makes a mask function: a name, what it makes, and the variable that this has captured."""
    from transformers import masking_utils as made

    yield "all of", made.and_masks(), "mask_functions"
    yield "window", made.sliding_window_overlay(1), "sliding_window"
    yield "documents", made.packed_sequence_mask_function(torch.zeros(1, 1)), "packed_sequence_mask"
    yield "chunks", made.chunked_overlay(1, torch.zeros(1)), "chunk_size"
    remap = getattr(made, "remap_positions_for_packed_sequence", None)
    if remap is not None:  # from 5.23 on: asks another for the positions of two tokens instead of their places
        yield "by position", remap(None, None), "mask_function"


def mask_of_pattern(pattern: Pattern, batch: int, q_len: int, kv_len: int) -> IntervalMask | None:
    """The mask by name that keeps exactly this pattern in every sequence of the batch, if there is one."""
    bounds = _row_bounds(pattern, 0, q_len, kv_len)
    if bounds is None:
        return None
    for sequence in range(1, batch):
        others = _row_bounds(pattern, sequence, q_len, kv_len)
        if others is None or not _equal(others, bounds):
            return None
    rows = np.arange(q_len)
    found = (mask for mask in _candidates(*bounds, q_len, kv_len) if _equal(mask.clipped_bounds(rows, q_len, kv_len), bounds))
    return next(found, None)


def matrix_of(function: MaskFunction | None, kept: Tensor | None, arguments: dict[str, Any], **places: int) -> Tensor:
    """(batch, 1, queries, keys), as transformers makes it for others. kept: the 2-d attention_mask."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    named = {name: arguments[name] for name in ("use_vmap", "device") if name in arguments}
    made: Tensor = sdpa_mask(
        mask_function=function or causal_mask_function,
        attention_mask=None if kept is None else kept.to(torch.bool),
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        **named,
        **places,
    )
    return made


def _row_bounds(pattern: Pattern, sequence: int, q_len: int, kv_len: int) -> Bounds | None:
    """First kept key and end of the kept keys of each row; None unless every row keeps one interval."""
    first, end = np.zeros(q_len, np.int64), np.zeros(q_len, np.int64)
    for start in range(0, q_len, ROWS):
        rows = range(start, min(start + ROWS, q_len))
        kept = pattern(sequence, rows, range(kv_len)).to(torch.uint8)
        lowest = kept.argmax(1)
        count = kept.sum(1)
        highest = kv_len - kept.flip(1).argmax(1)
        if not ((highest - lowest) == count).all():
            return None
        first[start : rows.stop], end[start : rows.stop] = lowest.cpu().numpy(), highest.cpu().numpy()
    return first, end


def _candidates(first: NDArray[np.int64], end: NDArray[np.int64], q_len: int, kv_len: int) -> list[IntervalMask]:
    """Masks this can be, by what a few rows look like; the caller compares every row."""
    diagonal = np.arange(q_len) + (kv_len - q_len)
    left, right = int((diagonal - first).max()), int((end - 1 - diagonal).max())
    starts = np.flatnonzero(np.diff(first, prepend=-1))
    documents = tuple(np.diff(starts, append=q_len).tolist())
    candidates: list[IntervalMask] = [Causal(), Full()]
    if left >= 0 and right >= 0:
        candidates.append(Window(left, right))
    if q_len == kv_len and q_len and end[0] > 1:
        candidates.append(Prefix(int(end[0])))
    if q_len == kv_len:
        candidates += [Documents(documents), Documents(documents, causal=False)]
    return candidates


def _equal(one: Bounds, other: Bounds) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
