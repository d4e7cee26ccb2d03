"""Prepare, check and time all candidates of one shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .candidates import Candidate, Runner, make_tensors
from .checks import Reference, repeats_differ
from .energy import Meter
from .names import CUDNN, is_ours
from .packages import first_line
from .shape import PASSES, Shape
from .timing import Spread, Stopwatch, interleaved

OK, FAILED, UNAVAILABLE = "ok", "failed check", "unavailable"


@dataclass
class Row:
    """One candidate, one pass, one shape. Times only if it passed its checks."""

    direction: str
    shape: Shape
    candidate: Candidate
    status: str = OK
    reason: str | None = None
    times: Spread | None = None
    joules: float | None = None
    identity: dict[str, Any] = field(default_factory=dict)
    runner: Runner | None = None

    def to_json(self, cudnn_ms: float | None, fastest_ms: float | None) -> dict[str, Any]:
        """`fastest_ms`: of the kernels that are not ours."""
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
            row |= {"median_ms": median, "p20_ms": low, "p80_ms": high, "tflops": self.shape.operations(self.direction) / median / 1e9}
            row["ratio_to_cudnn"] = cudnn_ms / median if cudnn_ms else None
            row["ratio_to_fastest_peer"] = fastest_ms / median if fastest_ms else None
        if self.joules is not None:
            row["energy_j"] = self.joules
        return row | ({"identity": self.identity} if self.identity else {})


def measure(
    shape: Shape,
    candidates: Sequence[Candidate],
    repeats: int,
    stopwatch: Callable[[], Stopwatch],
    device: torch.device,
    meter: Meter | None = None,
) -> list[dict[str, Any]]:
    """Rows of one shape, ready for JSON. Candidates that cannot compute it at all have none (peers.who_runs says why)."""
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
        except Exception as error:  # what a kernel cannot do, it says in many ways; each is recorded
            for row in made:
                row.status, row.reason = UNAVAILABLE, first_line(error)
        else:
            for row in made:
                row.identity = identity
    for direction in PASSES:
        runnable = [row for row in rows if row.direction == direction and row.status == OK]
        _time(runnable, repeats, stopwatch())
        if meter is not None:
            _weigh(runnable, meter)
    return [line for direction in PASSES for line in _to_json([row for row in rows if row.direction == direction])]


def _check(row: Row, runner: Runner, reference: Reference) -> None:
    first = runner.results(row.direction)
    complaint = reference.complaint(row.direction, first)
    if complaint is None and row.candidate.deterministic:
        complaint = repeats_differ(runner, row.direction, first)
    if complaint is not None:
        row.status, row.reason = FAILED, complaint


def _time(rows: list[Row], repeats: int, stopwatch: Stopwatch) -> None:
    calls = [row.runner.call(row.direction) for row in rows if row.runner is not None]
    for row, times in zip(rows, interleaved(calls, repeats, stopwatch) if calls else [], strict=True):
        row.times = times


def _weigh(rows: list[Row], meter: Meter) -> None:
    """One after the other: a counter of energy cannot tell candidates apart."""
    for row in rows:
        if row.runner is not None and row.times is not None:
            row.joules = meter.per_step(row.runner.call(row.direction), row.times.median)


def _to_json(rows: list[Row]) -> list[dict[str, Any]]:
    medians = {row.candidate.name: row.times.median for row in rows if row.times is not None}
    peers = [median for name, median in medians.items() if not is_ours(name)]
    return [row.to_json(medians.get(CUDNN), min(peers, default=None)) for row in rows]
