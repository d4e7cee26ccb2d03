"""CUDA graphs of a call. Importing it needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def capture(call: Callable[[], Result], warm_ups: int = 1) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of the call, and where each replay leaves its results.

    warm_ups: calls before the capture, on a stream of their own, as PyTorch asks for; 0 where the test has made them itself, or tests
    that a first call raises.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_ups):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results
