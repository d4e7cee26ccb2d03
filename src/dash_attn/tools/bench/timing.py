"""Interleaved timing: every repetition runs every candidate once, so that clocks and heat meet all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

LEAD_IN = 2_000_000  # cycles, about 1 ms: the GPU sleeps while the host queues the call, so launches cost no candidate anything
WARM_UP = 2


Call = Callable[[], Any]
Timer = Callable[[Sequence[Call]], Sequence[float]]  # runs calls one after the other; milliseconds of each


def cuda_times(calls: Sequence[Call]) -> list[float]:
    """By events on the current stream; nothing waits for the GPU before the last call is queued."""
    events = []
    for call in calls:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(LEAD_IN)
        start.record()
        call()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return [float(start.elapsed_time(end)) for start, end in events]


class Spread(NamedTuple):
    """Median, 20th and 80th percentile."""

    median: float
    low: float
    high: float


def interleaved(calls: Sequence[Call], repeats: int, timer: Timer) -> list[Spread]:
    """Time calls round-robin; each repetition begins with another one."""
    for call in calls:
        for _ in range(WARM_UP):
            call()
    order = np.array([(repeat + i) % len(calls) for repeat in range(repeats) for i in range(len(calls))])
    times = np.array(timer([calls[chosen] for chosen in order]))
    return [spread(times[order == i]) for i in range(len(calls))]


def spread(times: Sequence[float] | NDArray[Any]) -> Spread:
    low, median, high = np.percentile(times, (20, 50, 80))
    return Spread(float(median), float(low), float(high))
