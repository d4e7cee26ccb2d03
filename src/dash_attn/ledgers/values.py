"""Elements that were kept, as numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .entries import Entry


@dataclass(frozen=True)
class Element:
    """The first element that differs: its index, and value and bits in both runs."""

    index: tuple[int, ...]
    a: str
    b: str


def first_difference(entry: Entry, a: bytes, b: bytes) -> Element | None:
    """None where all elements that both runs kept are equal."""
    size = entry.itemsize
    for place in range(min(len(a), len(b)) // size):
        one, other = a[place * size : (place + 1) * size], b[place * size : (place + 1) * size]
        if one != other:
            return Element(_index(place, entry.shape), shown(one, entry.dtype), shown(other, entry.dtype))
    return None


def shown(data: bytes, dtype: str) -> str:
    """The value, and its bits: two numbers may look alike, and NaNs do."""
    return f"{_value(data, dtype)!r} (0x{data[::-1].hex()})"


def _value(data: bytes, dtype: str) -> Any:
    if dtype == "bfloat16":  # the upper half of a float32
        data, dtype = bytes(2) + data, "float32"
    if dtype in np.sctypeDict:
        return np.frombuffer(data, dtype=dtype)[0].item()
    import torch

    if not hasattr(torch, dtype):
        raise ValueError(f"this version of PyTorch has no dtype {dtype!r}")
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))[0].item()


def _index(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        place, rest = divmod(place, size)
        index.append(rest)
    return tuple(reversed(index))
