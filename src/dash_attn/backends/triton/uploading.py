"""Tables on their way to a GPU, and those that are there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..recently_used import Kept

MOST_TABLES = 128
Tables = TypeVar("Tables")
_kept: Kept[Any] = Kept(MOST_TABLES)


def kept_on(device: torch.device, key: Any, make: Callable[[], Tables]) -> Tables:
    """What was made before for this key, if it is on a GPU. Tables of a captured graph stay for good."""
    if device.type != "cuda":
        return make()
    found: Tables = _kept.find((device, key), make)
    return found


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """Once for each mask and shape; a captured graph cannot copy from the host."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("dash-attn: the first call with this mask and shape uploads tables, which a CUDA graph cannot: make it before")
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
