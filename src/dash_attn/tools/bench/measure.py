"""Prepare, check and time all candidates of one shape.

Timing is interleaved: every repetition runs every candidate once, so that clocks and heat meet all of them alike.
"""

from collections.abc import Callable, Iterator, Sequence
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


class Job(NamedTuple):
    """One candidate, one pass: its row of the results, what is timed (None: it did not pass its checks), and what decides its bits."""

    row: dict[str, Any]
    step: Step | None
    identity: dict[str, Any]


def measure(
    shape: Shape, candidates: Sequence[Candidate], repeats: int, timer: Timer, device: torch.device, scale: Scale | None = None
) -> list[dict[str, Any]]:
    """Rows of one shape, ready for JSON. Candidates that cannot compute it at all have none (candidates.who_runs says why)."""
    reference = Reference(shape, make_tensors(shape, device))
    jobs = [job for candidate in candidates if candidate.refuses(shape) is None for job in _checked(candidate, shape, reference)]
    of_passes = [[job for job in jobs if job.row["pass"] == direction] for direction in PASSES]
    return [row for some in of_passes for row in _timed(some, shape, repeats, timer, scale)]


def _checked(candidate: Candidate, shape: Shape, reference: Reference) -> list[Job]:
    what = {"shape": shape.to_json(), "candidate": candidate.name, "deterministic": candidate.deterministic, "status": OK, "reason": None}
    rows: list[dict[str, Any]] = [{"pass": direction, **what} for direction in PASSES if direction in candidate.passes]
    try:
        runner = candidate.prepare(shape, reference.tensors)
        for row in rows:
            complaint = _complaint(candidate, runner, row["pass"], shape, reference)
            row |= {"status": FAILED, "reason": complaint} if complaint else {}
        identity = candidate.identify(shape, reference.tensors) if candidate.identify else {}
    except Exception as error:  # what a kernel cannot do, it says in many ways; each is recorded
        return [Job(row | {"status": UNAVAILABLE, "reason": first_line(error)}, None, {}) for row in rows]
    return [Job(row, runner.call(row["pass"]) if row["status"] == OK else None, identity) for row in rows]


def _complaint(candidate: Candidate, runner: Runner, direction: str, shape: Shape, reference: Reference) -> str | None:
    first = runner.results(direction)
    complaint = reference.complaint(direction, first)
    if complaint is None and candidate.deterministic:
        complaint = repeats_differ(runner, direction, first)
    if complaint is None and candidate.promised is not None:
        complaint = not_as_promised(first, candidate.promised(shape, reference.tensors))
    return complaint


def _timed(jobs: list[Job], shape: Shape, repeats: int, timer: Timer, scale: Scale | None) -> Iterator[dict[str, Any]]:
    """The rows of a pass, with times and their ratios."""
    steps = {job.row["candidate"]: job.step for job in jobs if job.step is not None}
    times = dict(zip(steps, interleaved([*steps.values()], repeats, timer) if steps else [], strict=True))
    medians = {name: spread.median for name, spread in times.items()}
    peers = [median for name, median in medians.items() if not is_ours(name)]
    others = {"ratio_to_cudnn": medians.get(CUDNN), "ratio_to_fastest_peer": min(peers, default=None)}
    own = {"ratio_to_unordered": medians.get(UNORDERED), "ratio_to_equal_heads": medians.get(EQUAL_HEADS)}
    for row, _, identity in jobs:
        name, direction = row["candidate"], row["pass"]
        if name in times:
            median, low, high = times[name]
            row |= {"median_ms": median, "p20_ms": low, "p80_ms": high, "tflops": shape.tflops(direction, median)}
            row |= {ratio: ms / median if ms else None for ratio, ms in others.items()}
            row |= {ratio: ms / median for ratio, ms in own.items() if ms and is_ours(name)}
            row |= scale.readings(steps[name], median) if scale is not None else {}
        if "sustained" in row:
            row["sustained"]["tflops"] = shape.tflops(direction, row["sustained"]["ms"])
        yield row | ({"identity": identity} if identity else {})
