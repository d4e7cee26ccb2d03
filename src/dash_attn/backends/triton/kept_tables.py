"""Tables that are on a GPU already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..kept import Kept

MOST_TABLES = 128
Tables = TypeVar("Tables")
_kept: Kept[Any] = Kept(MOST_TABLES)


def kept_on(device: torch.device, key: Any, make: Callable[[], Tables]) -> Tables:
    """What was made before for this key, if it is on a GPU. Tables of a captured graph stay for good."""
    if device.type != "cuda":
        return make()
    found: Tables = _kept.find((device, key), make)
    return found
