"""Memory of a GPU that outlives a call: what is uploaded once and then shared by every call that needs it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Made = TypeVar("Made")


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    on_host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return on_host.to(device)
    refuse_capture()
    memory = lasting(lambda: on_host.to(device), device)
    torch.cuda.current_stream(device).synchronize()  # once: other streams may use it from now on
    return memory


def refuse_capture() -> None:
    """A graph would replay addresses, but neither the preparation nor the upload behind them."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the first call with a new shape prepares kernels and tables and cannot be captured; run it once before the graph"
        )


def refuse_capture_of(mask: object) -> None:
    """A graph would hold the addresses of tables and bits that are kept as long as the mask, and launches for all of its patterns."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "boolean masks that differ between sequences or heads cannot be captured in a CUDA graph: give one mask for all,"
            f" made as a BooleanMask before the capture; got {mask}"
        )


def lasting(make: Callable[[], Made], device: torch.device) -> Made:
    """What `make` allocates on the current stream, but never from the pool of a CUDA graph.

    While torch.compile warms up a graph, PyTorch takes all memory that its thread asks for from the graph's pool, and what is left there
    afterwards is an error. So another thread asks.
    """
    if device.type != "cuda":
        return make()
    stream = torch.cuda.current_stream(device)

    def on_same_stream() -> Made:
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(on_same_stream).result()
