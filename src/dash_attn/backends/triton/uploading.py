"""Tables on their way to a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """Once for each mask and shape; a captured graph cannot copy from the host."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("dash-attn: the first call with this mask and shape uploads tables, which a CUDA graph cannot: make it before")
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
