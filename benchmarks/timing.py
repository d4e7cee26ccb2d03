"""How every script times a call on a GPU: events around it, behind a sleep that hides the host; or replays of a CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

LEAD_IN = 2_000_000  # cycles, about 1 ms: the launches queue up behind a sleep of the GPU, so that host time does not count
WARM_UP = 3
Call = Callable[[], Any]


def milliseconds(calls: Sequence[Call], runs: int, lead_in: int = LEAD_IN) -> list[float]:
    """The median time of each. Calls take turns, so that clocks and heat meet all of them alike. lead_in 0: host time counts."""
    times = [[timed(call, lead_in).gpu for call in calls] for _ in range(WARM_UP + runs)][WARM_UP:]
    return [median(of_call) for of_call in zip(*times, strict=True)]


class Timed(NamedTuple):
    """Milliseconds until a call returned, and until the GPU was through with it (without a GPU: the same)."""

    host: float
    gpu: float


def timed(call: Call, lead_in: int = LEAD_IN) -> Timed:
    if not torch.cuda.is_available():
        return Timed(*(host_milliseconds(call),) * 2)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if lead_in:
        torch.cuda._sleep(lead_in)
    start.record()
    host = host_milliseconds(call)
    end.record()
    end.synchronize()
    return Timed(host, float(start.elapsed_time(end)))


def host_milliseconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def replayed(prepare: Callable[[], Call]) -> Call:
    """The call that `prepare` returns, captured once as a CUDA graph. Its replay costs the host a single launch.

    A backward runs on the stream of its forward: so all is prepared, run once and captured on one stream.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call = prepare()
        call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            call()
    torch.cuda.synchronize()
    return lambda _kept=call: graph.replay()  # which holds the memory that the graph reads
