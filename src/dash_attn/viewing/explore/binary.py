"""Arrays and whole answers as text that a browser reads without a library."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Letters of the types that the page knows (page/data.js), smallest first. float64 holds whole numbers up to 2^53.
TYPES = {"B": "u1", "H": "<u2", "i": "<i4", "d": "<f8"}
EXACT = 2**53


def encoded(values: NDArray[Any] | Sequence[int]) -> str:
    """Whole numbers in the smallest type that holds them: its letter, then the bytes in base64."""
    numbers = np.asarray(values, dtype=np.int64)
    least, most = int(numbers.min(initial=0)), int(numbers.max(initial=0))
    if max(-least, most) > EXACT:
        raise OverflowError(f"{max(-least, most)} ticks are too many for a page")
    letter = next(letter for letter, kind in TYPES.items() if letter == "d" or (np.iinfo(kind).min <= least and most <= np.iinfo(kind).max))
    return letter + base64.b64encode(numbers.astype(TYPES[letter]).tobytes()).decode()


def as_text(answer: dict[str, Any]) -> str:
    """JSON that can stand inside of a script element."""
    return json.dumps(answer, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")


def compressed(answer: dict[str, Any]) -> str:
    """The same, gzipped and in base64. Without a time stamp: the same answer gives the same text."""
    return base64.b64encode(gzip.compress(as_text(answer).encode(), compresslevel=6, mtime=0)).decode()
