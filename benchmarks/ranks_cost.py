"""What it costs that ranks compare each call: python -m benchmarks.ranks_cost [--ranks P] [--json FILE]

Microseconds of the host, medians, on processes of this machine: of the comparison alone, while the GPU is idle and while it is busy; of
all that comes before the first tensor travels, and of its part without messages; of small calls with and without the comparison.
On a GPU all ranks share the first one; without one, tensors are on the CPU.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
import torch.distributed as dist

from dash_attn.call.options import Choices
from dash_attn.distributed import context_parallel_attention
from dash_attn.distributed.context.asked import Asked, Given, Sharing
from dash_attn.distributed.context.of_rank import OfRank
from dash_attn.distributed.hosts import ATTENTION, Hosts
from dash_attn.distributed.peers import Peers
from dash_attn.tools.bench.report import save
from processes import run_processes

from .timing import host_milliseconds
from .training import surroundings

MESSAGES, CALLS, ROUNDS, WARM_UP = 500, 20, 10, 5
AHEAD = 300_000_000  # cycles that the GPU sleeps while hosts compare
ROWS, HEADS, DIM = 256, 2, 64


def microseconds(action: Callable[[], object], count: int) -> list[float]:
    return [1e3 * host_milliseconds(action) for _ in range(count)]


@contextmanager
def without_comparison() -> Iterator[None]:
    """All ranks are taken to tell what this one does."""

    def begin(self: Hosts, call: str, numbers: Sequence[int], refused: bool = False) -> list[list[int]]:
        self.number += 1
        return [list(numbers)] * self.count

    with patch.object(Hosts, "begin", begin):
        yield


def while_busy(compare: Callable[[], object]) -> float | None:
    """None: the GPU was idle before the last comparison ended."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda._sleep(AHEAD)
    behind = torch.cuda.current_stream().record_event()
    found = median(microseconds(compare, 50))
    return None if behind.query() else found


def measure(_: int) -> dict[str, float | None]:
    """As this rank finds it."""
    peers, device = Peers.of(None), "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (torch.ones(1, ROWS, HEADS, DIM, dtype=dtype, device=device, requires_grad=True) for _ in range(3))

    def compare() -> object:
        return peers.hosts.begin(ATTENTION, [1, 2, 3])

    def call() -> None:
        out = context_parallel_attention(q, k, v, causal=True)
        out.sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()

    microseconds(compare, WARM_UP)
    microseconds(call, WARM_UP)
    asked = Asked(q, k, v, Given(), Choices(causal=True), Sharing("zigzag", 1, None), peers.count)
    found: dict[str, float | None] = {"comparison": median(microseconds(compare, MESSAGES))}
    found["agreement on a call"] = median(microseconds(lambda: OfRank.agreed(asked, peers, True), MESSAGES))
    found["its own checks alone"] = median(microseconds(lambda: asked.part(peers.rank, True), MESSAGES))
    if device == "cuda":
        found["comparison, GPU busy"] = while_busy(compare)
    times: dict[str, list[float]] = {"forward and backward": [], "without comparison": []}
    for _ in range(ROUNDS):  # in turn: a machine has better and worse seconds
        times["forward and backward"] += microseconds(call, CALLS)
        with without_comparison():
            times["without comparison"] += microseconds(call, CALLS)
    dist.barrier()
    return found | {name: median(some) for name, some in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run_processes(measure, arguments.ranks, Path(folder), limit=3600)[0]
    for name, value in found.items():
        print(f"{name:24} {'-' if value is None else f'{value:.0f} us'}")
    if arguments.json:
        save({"environment": surroundings(), "ranks": arguments.ranks, "microseconds": found}, arguments.json)


if __name__ == "__main__":
    main()
