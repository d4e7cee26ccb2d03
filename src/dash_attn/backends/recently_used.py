"""Values that calls come back to, by key."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

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
