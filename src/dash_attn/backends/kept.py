"""What outlives a call: values that calls come back to, by key, and memory of a GPU that is uploaded once and then shared by calls."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Value = TypeVar("Value")


class Kept(Generic[Value]):
    """The values used last. One that is used while a graph is captured stays for good: the graph holds addresses of its memory."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self.values: OrderedDict[Any, Value] = OrderedDict()  # least recently used first
        self.in_graphs: list[Value] = []

    def get(self, key: Any) -> Value | None:
        with self._lock:
            value = self.values.get(key)
            if value is not None:
                self.values.move_to_end(key)
                if torch.cuda.is_current_stream_capturing():
                    self.in_graphs.append(value)
        return value

    def find(self, key: Any, make: Callable[[], Value]) -> Value:
        """The value of a key; it is made where there is none."""
        value = self.get(key)
        if value is None:
            value = make()
            self.put(key, value)
        return value

    def put(self, key: Any, value: Value) -> list[Value]:
        """Those that had to go."""
        with self._lock:
            gone = [self.values.popitem(last=False)[1] for _ in range(len(self.values) - self._most + 1)]
            self.values[key] = value
        return gone

    def clear(self) -> None:
        self.values.clear()


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


def lasting(make: Callable[[], Value], device: torch.device) -> Value:
    """What `make` allocates on the current stream, but never from the pool of a CUDA graph.

    While torch.compile warms up a graph, PyTorch takes all memory that its thread asks for from the graph's pool, and what is left there
    afterwards is an error. So another thread asks.
    """
    if device.type != "cuda":
        return make()
    stream = torch.cuda.current_stream(device)

    def on_same_stream() -> Value:
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(on_same_stream).result()
