"""Interleaved timing: every repetition runs every candidate once, so that clocks and heat meet all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

LEAD_IN = 2_000_000  # cycles, about 1 ms: the GPU sleeps while the host queues the call, so launches cost no candidate anything
WARM_UP = 2


class Stopwatch(Protocol):
    def start(self) -> None: ...

    def stop(self) -> None: ...

    def times(self) -> list[float]:
        """Milliseconds from every start to its stop."""


class CudaStopwatch:
    """Events on the current stream; nothing waits for the GPU before `times`."""

    def __init__(self) -> None:
        self.events: list[torch.cuda.Event] = []

    def start(self) -> None:
        torch.cuda._sleep(LEAD_IN)
        self._mark()

    def stop(self) -> None:
        self._mark()

    def _mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.events.append(event)

    def times(self) -> list[float]:
        torch.cuda.synchronize()
        return [float(a.elapsed_time(b)) for a, b in zip(self.events[::2], self.events[1::2], strict=True)]


class Spread(NamedTuple):
    """Median, 20th and 80th percentile."""

    median: float
    low: float
    high: float


def interleaved(calls: Sequence[Callable[[], Any]], repeats: int, stopwatch: Stopwatch) -> list[Spread]:
    """Time calls round-robin; each repetition begins with another one."""
    for call in calls:
        for _ in range(WARM_UP):
            call()
    order = []
    for repeat in range(repeats):
        for i in range(len(calls)):
            chosen = (repeat + i) % len(calls)
            order.append(chosen)
            stopwatch.start()
            calls[chosen]()
            stopwatch.stop()
    times = np.array(stopwatch.times())
    return [spread(times[np.array(order) == i]) for i in range(len(calls))]


def spread(times: Sequence[float] | NDArray[Any]) -> Spread:
    low, median, high = np.percentile(times, (20, 50, 80))
    return Spread(float(median), float(low), float(high))
