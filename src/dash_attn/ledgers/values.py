"""Elements that were kept, as numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .entries import Entry


@dataclass(frozen=True)
class Element:
    """The first element that differs: its index, and value and bits in both runs."""

    index: tuple[int, ...]
    a: str
    b: str


def first_difference(entry: Entry, a: bytes, b: bytes) -> Element | None:
    """None where all elements that both runs kept are equal."""
    size = entry.torch_dtype.itemsize
    for place in range(min(len(a), len(b)) // size):
        one, other = a[place * size : (place + 1) * size], b[place * size : (place + 1) * size]
        if one != other:
            return Element(_index(place, entry.shape), shown(one, entry.torch_dtype), shown(other, entry.torch_dtype))
    return None


def shown(data: bytes, dtype: torch.dtype) -> str:
    """The value, and its bits: two numbers may look alike, and NaNs do."""
    value = torch.frombuffer(bytearray(data), dtype=dtype)[0].item()
    return f"{value!r} (0x{data[::-1].hex()})"


def _index(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        place, rest = divmod(place, size)
        index.append(rest)
    return tuple(reversed(index))
