"""Prepare, check and time all candidates of one shape.

Timing is interleaved: every repetition runs every candidate once, so that clocks and heat meet all of them alike.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from .candidates import CUDNN, EQUAL_HEADS, UNORDERED, Candidate, Runner, first_line, is_ours, make_tensors
from .checks import Reference, not_as_promised, repeats_differ
from .shape import PASSES, Shape

LEAD_IN = 2_000_000  # cycles, about 1 ms: the GPU sleeps while the host queues the call, so launches cost no candidate anything
WARM_UP = 2
OK, FAILED, UNAVAILABLE = "ok", "failed check", "unavailable"
Step = Callable[[], Any]
Timer = Callable[[Sequence[Step]], Sequence[float]]  # runs steps one after the other; milliseconds of each


def cuda_times(steps: Sequence[Step]) -> list[float]:
    """By events on the current stream; nothing waits for the GPU before the last step is queued."""
    events = []
    for step in steps:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(LEAD_IN)
        start.record()
        step()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return [float(start.elapsed_time(end)) for start, end in events]


class Spread(NamedTuple):
    """Median, 20th and 80th percentile."""

    median: float
    low: float
    high: float


def interleaved(calls: Sequence[Step], repeats: int, timer: Timer) -> list[Spread]:
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


class Scale(Protocol):
    """What is run by itself after the interleaved timing, because its counters cannot tell candidates apart."""

    def readings(self, step: Step, expected_ms: float) -> dict[str, Any]: ...


@dataclass
class Row:
    """One candidate, one pass, one shape. Times only if it passed its checks."""

    direction: str
    shape: Shape
    candidate: Candidate
    status: str = OK
    reason: str | None = None
    times: Spread | None = None
    readings: dict[str, Any] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)
    runner: Runner | None = None

    def to_json(self, baselines: Mapping[str, float | None]) -> dict[str, Any]:
        """`baselines`: names of ratios, and the time that each is relative to."""
        row: dict[str, Any] = {
            "pass": self.direction,
            "shape": self.shape.to_json(),
            "candidate": self.candidate.name,
            "deterministic": self.candidate.deterministic,
            "status": self.status,
            "reason": self.reason,
        }
        if self.times is not None:
            median, low, high = self.times
            row |= {"median_ms": median, "p20_ms": low, "p80_ms": high, "tflops": self.shape.tflops(self.direction, median)}
            row |= {name: ms / median if ms else None for name, ms in baselines.items()}
        if "sustained" in self.readings:
            self.readings["sustained"]["tflops"] = self.shape.tflops(self.direction, self.readings["sustained"]["ms"])
        return row | self.readings | ({"identity": self.identity} if self.identity else {})


def measure(
    shape: Shape,
    candidates: Sequence[Candidate],
    repeats: int,
    timer: Timer,
    device: torch.device,
    scale: Scale | None = None,
) -> list[dict[str, Any]]:
    """Rows of one shape, ready for JSON. Candidates that cannot compute it at all have none (candidates.who_runs says why)."""
    tensors = make_tensors(shape, device)
    reference = Reference(shape, tensors)
    rows: list[Row] = []
    for candidate in (candidate for candidate in candidates if candidate.refuses(shape) is None):
        made = [Row(direction, shape, candidate) for direction in PASSES if direction in candidate.passes]
        rows += made
        try:
            runner = candidate.prepare(shape, tensors)
            for row in made:
                row.runner = runner
                _check(row, runner, reference)
            identity = candidate.identify(shape, tensors) if candidate.identify else {}
            for row in made:
                row.identity = identity
        except Exception as error:  # what a kernel cannot do, it says in many ways; each is recorded
            for row in made:
                row.status, row.reason = UNAVAILABLE, first_line(error)
    for direction in PASSES:
        _time([row for row in rows if row.direction == direction and row.status == OK], repeats, timer, scale)
    return [line for direction in PASSES for line in _to_json([row for row in rows if row.direction == direction])]


def _check(row: Row, runner: Runner, reference: Reference) -> None:
    first = runner.results(row.direction)
    complaint = reference.complaint(row.direction, first)
    if complaint is None and row.candidate.deterministic:
        complaint = repeats_differ(runner, row.direction, first)
    if complaint is None and row.candidate.promised is not None:
        complaint = not_as_promised(first, row.candidate.promised(row.shape, reference.tensors))
    if complaint is not None:
        row.status, row.reason = FAILED, complaint


def _time(rows: list[Row], repeats: int, timer: Timer, scale: Scale | None) -> None:
    calls = [row.runner.call(row.direction) for row in rows if row.runner is not None]
    for row, call, times in zip(rows, calls, interleaved(calls, repeats, timer) if calls else [], strict=True):
        row.times = times
        if scale is not None:
            row.readings = scale.readings(call, times.median)


def _to_json(rows: list[Row]) -> list[dict[str, Any]]:
    medians = {row.candidate.name: row.times.median for row in rows if row.times is not None}
    peers = [median for name, median in medians.items() if not is_ours(name)]
    others = {"ratio_to_cudnn": medians.get(CUDNN), "ratio_to_fastest_peer": min(peers, default=None)}
    own = {"ratio_to_unordered": medians.get(UNORDERED), "ratio_to_equal_heads": medians.get(EQUAL_HEADS)}
    for_ours = others | {name: ms for name, ms in own.items() if ms}
    return [row.to_json(for_ours if is_ours(row.candidate.name) else others) for row in rows]
