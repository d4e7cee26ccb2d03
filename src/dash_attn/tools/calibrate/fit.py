"""The constants with which the simulator gives the measured times of some schedules.

`estimate` reads them straight off measured spans: medians of what each of them means. Where a fit starts. `fit` is least squares.

A simulated makespan is a sum of constants along its critical path, so how often each one lies on that path is its exact
derivative. The fit is Gauss and Newton's with Levenberg's damping, on logarithms: relative errors count, constants stay
positive, and one that no observation depends on stays where it was. A schedule collapses where a hand-over takes longer
than the steps between two turns, so there are several valleys: the fit starts on both sides of such cliffs.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ...scheduling.order import neighbours
from ...scheduling.schedule import Schedule
from ...simulation.critical_path import critical_path, turn_predecessors
from ...simulation.simulate import Machine, Timeline, simulate
from ...viewing.task_times import Floats, TaskTimes

CONSTANTS = ("compute", "reduce", "latency", "startup")
DIGITS = 4  # decimals of a constant, in microseconds
LEAST = 1e-3  # of compute: where a constant starts that was 0, which a logarithm cannot leave
LONGEST_STEP = 0.7  # of a logarithm: a constant at most doubles or halves at once
ITERATIONS = 25
ENOUGH = 1e-4  # relative decrease of the sum of squares below which it is done
MOST_DAMPING = 100.0
LATENCIES = (0.5, 1.0, 2.0)  # of a compute: where fits start, beside what they are given
WAITED = 0.2  # of a compute: a reduce that started later than that after its compute has waited for its turn

Run = tuple[Schedule, TaskTimes]


class Observation(NamedTuple):
    """A schedule and the time it took."""

    schedule: Schedule
    measured: float


@dataclass(frozen=True)
class Fit:
    """Constants, and predicted / measured - 1 of every observation."""

    machine: Machine
    errors: tuple[float, ...]

    @property
    def median_error(self) -> float:
        return float(np.median(np.abs(self.errors)))


def fit(observations: Sequence[Observation], start: Machine, free: Sequence[str] = CONSTANTS) -> Fit:
    """Fit the constants in `free`, from those of `start`; the others stay. Without any, this only tells the errors."""
    if not set(free) <= set(CONSTANTS):
        raise ValueError(f"free must name some of {', '.join(CONSTANTS)}; got {', '.join(free)}")
    if len(observations) < max(1, len(free)):
        raise ValueError(f"{len(free)} constants need at least as many observations; got {len(observations)}")
    if any(observation.measured <= 0 for observation in observations):
        raise ValueError("measured times must be positive")
    return _Fitter(observations, start, tuple(free)).run()


class _Fitter:
    def __init__(self, observations: Sequence[Observation], start: Machine, free: tuple[str, ...]) -> None:
        self.observations, self.start, self.free = observations, start, free
        self.measured = np.array([observation.measured for observation in observations])

    def run(self) -> Fit:
        if not self.free:
            return Fit(self.start, tuple(np.expm1(self._look(np.zeros(0))[0]).tolist()))
        values = np.array([max(float(getattr(self.start, name)), LEAST * self.start.compute) for name in self.free])
        starts = [values]
        if "latency" in self.free:
            is_latency = np.array(self.free) == "latency"
            starts += [np.where(is_latency, share * self.start.compute, values) for share in LATENCIES]
        values, residuals = min((self._descend(start) for start in starts), key=lambda found: float(found[1] @ found[1]))
        return Fit(self._machine(values), tuple(np.expm1(residuals).tolist()))

    def _descend(self, values: Floats) -> tuple[Floats, Floats]:
        """Downhill from `values` to where it is level; also the residuals there."""
        damping = 1e-2
        residuals, slopes = self._look(values)
        for _ in range(ITERATIONS):
            step = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(values)), -slopes.T @ residuals)
            trial = values * np.exp(np.clip(step, -LONGEST_STEP, LONGEST_STEP))
            found, found_slopes = self._look(trial)
            gain = 1 - float(found @ found) / max(float(residuals @ residuals), 1e-300)
            if gain > 0:
                values, residuals, slopes, damping = trial, found, found_slopes, damping / 4
            else:
                damping *= 8
            if 0 <= gain < ENOUGH or damping > MOST_DAMPING or float(residuals @ residuals) < 1e-10:
                break
        return values, residuals

    def _machine(self, values: Floats) -> Machine:
        found: dict[str, Any] = {name: round(float(value), DIGITS) for name, value in zip(self.free, values, strict=True)}
        return replace(self.start, **found)

    def _look(self, values: Floats) -> tuple[Floats, Floats]:
        """Logarithms of predicted over measured, and their derivatives by the logarithm of each free constant."""
        machine = self._machine(values)
        timelines = [simulate(observation.schedule, machine) for observation in self.observations]
        predicted = np.array([timeline.makespan for timeline in timelines])
        counts = np.array([path_counts(timeline) for timeline in timelines], dtype=np.float64)
        free = [CONSTANTS.index(name) for name in self.free]
        return np.log(predicted / self.measured), counts[:, free] * values / predicted[:, None]


def path_counts(timeline: Timeline) -> tuple[int, int, int, int]:
    """How often compute, reduce, latency and startup lie on the critical path; times the constants, they make the makespan."""
    costs, causes = timeline.machine.costs, Counter(cause for _, cause in critical_path(timeline))
    latency = causes["turn"] if costs.latency >= costs.reduce else 0
    reduce = 1 + causes["turn"] - latency + causes["drain"] + causes["buffer"] + causes["worker"]  # 1: the last
    return causes["compute"], reduce, latency, causes["start"] + causes["worker"]


def estimate(runs: Sequence[Run]) -> Machine:
    """Of all runs together. Without any wait a hand-over cannot be seen; it then counts as long as a reduce."""
    if not runs:
        raise ValueError("nothing to estimate from: at least one measured run is needed")
    compute = _median([spans.compute_end - spans.compute_start for _, spans in runs])
    reduce = _median([spans.reduce_end - spans.reduce_start for _, spans in runs])
    latency = _median([_hand_overs(schedule, spans, WAITED * compute) for schedule, spans in runs], otherwise=reduce)
    startup = max(0.0, _median([_starts(spans) for _, spans in runs], otherwise=0.0))
    compute, reduce, latency, startup = (round(value, DIGITS) for value in (compute, reduce, latency, startup))
    return Machine(compute, reduce, runs[0][1].drains, latency, startup)


def _median(values: Sequence[Floats], otherwise: float | None = None) -> float:
    pooled = np.concatenate(values)
    if not len(pooled) and otherwise is not None:
        return otherwise
    return float(np.median(pooled))


def _hand_overs(schedule: Schedule, spans: TaskTimes, waited: float) -> Floats:
    """From the start of a reduce to the start of the next turn on the same dQ tile, where that one waited for it."""
    before = turn_predecessors(schedule)
    late = np.flatnonzero((before >= 0) & (spans.reduce_start - spans.compute_end > waited))
    return spans.reduce_start[late] - spans.reduce_start[before[late]]


def _starts(spans: TaskTimes) -> Floats:
    """From the end of a chain to the first compute of the next one on its worker."""
    tickets, start, end = spans.chains
    before, after = neighbours(spans.worker[tickets], start)
    return start[after] - end[before]
