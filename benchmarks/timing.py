"""How every script times a call on a GPU: events around it, behind a sleep that hides the host; or replays of a CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

LEAD_IN = 2_000_000  # cycles, about 1 ms: the launches queue up behind a sleep of the GPU, so that host time does not count
WARM_UP = 3
Call = Callable[[], Any]


def milliseconds(calls: Sequence[Call], runs: int, lead_in: int = LEAD_IN) -> list[float]:
    """The median time of each. Calls take turns, so that clocks and heat meet all of them alike. lead_in 0: host time counts."""
    on_gpu = torch.cuda.is_available()
    times = [[_of_gpu(call, lead_in) if on_gpu else _of_host(call) for call in calls] for _ in range(WARM_UP + runs)][WARM_UP:]
    return [median(of_call) for of_call in zip(*times, strict=True)]


def _of_gpu(call: Call, lead_in: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if lead_in:
        torch.cuda._sleep(lead_in)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _of_host(call: Call) -> float:
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

    def replay(_kept: Call = call) -> None:
        """`_kept` holds the memory that the graph reads."""
        graph.replay()

    return replay
