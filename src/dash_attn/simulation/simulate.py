"""simulate(schedule, machine) -> Timeline: when every task runs, what stalls, and how far that is from the bound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..scheduling.engine import Costs, Execution, Progress, run_in_model_time
from ..scheduling.problem import Problem, Task, whole_number
from ..scheduling.schedule import Schedule
from .critical_path import critical_path

MOST_TASKS = 50_000_000  # about a minute, and some gigabytes


class LowerBounds(NamedTuple):
    """In ticks. No order and no placement can be faster than `best`."""

    work: Fraction
    longest_chain: Fraction
    most_loaded_q_tile: Fraction
    offsets: Fraction

    @property
    def best(self) -> Fraction:
        return max(self)


def lower_bounds(problem: Problem, costs: Costs, workers: int) -> LowerBounds:
    compute, reduce, latency, overlap, startup = costs
    # Without overlap a task holds its worker for compute + reduce. With it the slower of the two stages is the pace,
    # and the last reduce of a worker still follows its last compute.
    pace = Fraction(compute + reduce) if overlap == 0 else max(Fraction(compute), Fraction(reduce, overlap))
    tail = reduce if overlap and pace == compute else 0
    members = np.array([len(problem.members(part)) for part in range(problem.parts)])
    lengths = np.outer(members, problem.chain_lengths[problem.chain_lengths > 0]).ravel()  # of all chains of a KV head
    copies = problem.batch * problem.heads
    most_turns = int(problem.turns_per_q_tile.max(initial=0))
    if not problem.tasks:
        return LowerBounds(Fraction(0), Fraction(0), Fraction(0), Fraction(0))
    return LowerBounds(
        work=(problem.tasks * pace + len(lengths) * copies * startup) / workers + tail,
        longest_chain=int(lengths.max()) * pace + startup + tail,
        most_loaded_q_tile=Fraction(startup + compute + (most_turns - 1) * max(reduce, latency) + reduce),
        offsets=_pigeonhole(np.sort(lengths), copies, workers, pace, startup) + tail,
    )


def _pigeonhole(ascending: NDArray[np.int64], copies: int, workers: int, pace: Fraction, startup: int) -> Fraction:
    """Of the k * workers + 1 longest chains, k + 1 share a worker: at least the k + 1 shortest of those."""
    longest_first = np.append(ascending[::-1], 0)
    before = np.concatenate([[0], np.cumsum(longest_first)])
    chains = (len(longest_first) - 1) * copies
    shared = np.arange(1, (chains - 1) // workers + 1)

    def total(count: NDArray[np.int64]) -> NDArray[np.int64]:
        """Length of the `count` longest chains, each of which occurs `copies` times."""
        whole, rest = np.divmod(count, copies)
        return np.asarray(before[whole] * copies + longest_first[whole] * rest)

    together = total(shared * workers + 1) - total(shared * workers - shared)
    scaled = together * pace.numerator + (shared + 1) * (startup * pace.denominator)
    return Fraction(int(scaled.max(initial=0)), pace.denominator)


@dataclass(frozen=True)
class Machine:
    """What a task costs, and what starting a chain costs. The defaults are the paper's model with compute 1 and reduce 0.3.

    compute: the matrix products of a task.
    reduce: adding its partial result to dQ.
    overlap: finished tiles a worker may hold while they are reduced in the background; 0 means it reduces them itself.
    latency: from the start of a reduce until the next turn may start, if that is longer than the reduce.
    startup: of a chain, before its first compute.
    """

    compute: float = 1.0
    reduce: float = 0.3
    overlap: int = 0
    latency: float = 0.0
    startup: float = 0.0

    def __post_init__(self) -> None:
        for name in ("compute", "reduce", "latency", "startup"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value) or value < 0 or (name == "compute" and value == 0):
                raise ValueError(f"{name} must be a finite number {'> 0' if name == 'compute' else '>= 0'}; got {value!r}")
            if abs(float(self._exact(value)) - value) > 1e-3 * value:
                raise ValueError(f"{name} is resolved to a millionth: choose a unit in which compute is about 1; got {value!r}")
        whole_number("overlap", self.overlap, least=0)

    @cached_property
    def ticks_per_unit(self) -> int:
        """Costs are read as decimals of at most six places and scaled to whole ticks, so that a simulation is exact."""
        return math.lcm(*(self._exact(v).denominator for v in (self.compute, self.reduce, self.latency, self.startup)))

    @property
    def costs(self) -> Costs:
        times = (self.compute, self.reduce, self.latency, self.startup)
        compute, reduce, latency, startup = (int(self._exact(v) * self.ticks_per_unit) for v in times)
        return Costs(compute, reduce, latency, int(self.overlap), startup)

    @staticmethod
    def _exact(value: float) -> Fraction:
        return Fraction(round(Fraction(str(value)) * 10**6), 10**6)


class Stalls(NamedTuple):
    """Worker time lost inside chains, as a share of all worker time, by cause."""

    order: float  # a reduce waits for the turn before it
    buffer: float  # every staging buffer is full, though no turn is late
    drain: float  # the chain's last reduces, after its last compute, and its dK and dV, where it adds them to a sum

    @property
    def total(self) -> float:
        return sum(self)


class Hop(NamedTuple):
    """One event of the critical path and what it waited for: start, worker, compute, buffer, drain or turn."""

    task: Task
    phase: str  # compute, reduce, or add: of dK and dV, after this task
    cause: str


@dataclass(frozen=True, eq=False)
class Timeline:
    """A simulated run. Task arrays are indexed like the plan: by ticket, then along the walk. Times are in the machine's unit."""

    schedule: Schedule
    machine: Machine
    execution: Execution

    @property
    def makespan(self) -> float:
        return self._ticks / self.machine.ticks_per_unit

    @property
    def _ticks(self) -> int:
        return int(self.execution.chain_end.max(initial=0))

    @cached_property
    def bounds(self) -> LowerBounds:
        """Lower bounds in ticks; `lower_bound` is the best of them in the machine's unit."""
        return lower_bounds(self.schedule.problem, self.machine.costs, self.schedule.workers)

    @property
    def lower_bound(self) -> float:
        return float(self.bounds.best / self.machine.ticks_per_unit)

    @property
    def gap(self) -> float:
        return float(self._ticks / self.bounds.best - 1) if self.bounds.best else 0.0

    @property
    def utilization(self) -> float:
        """Share of worker time spent on tasks (on compute alone where reduces overlap it)."""
        costs = self.machine.costs
        per_task = costs.compute + (costs.reduce if costs.overlap == 0 else 0)
        return self._share(self.schedule.problem.tasks * per_task)

    @property
    def stalled(self) -> float:
        """Share of worker time spent waiting inside chains."""
        return self.stalls.total

    @cached_property
    def stalls(self) -> Stalls:
        costs, run = self.machine.costs, self.execution
        if not len(run.compute_start):
            return Stalls(0.0, 0.0, 0.0)
        compute_end = run.compute_start + costs.compute
        last = np.zeros(len(compute_end), dtype=bool)
        nonempty = np.diff(run.offsets) > 0
        last[run.offsets[1:][nonempty] - 1] = True
        tasks_end = run.chain_end.copy()  # a chain without tasks and adds ends where it starts
        if run.add_start.size:
            tasks_end[~nonempty] = run.chain_start[~nonempty] + costs.startup
        tasks_end[nonempty] = compute_end[last] if costs.overlap else run.reduce_start[last] + costs.reduce
        drain = (run.chain_end - tasks_end).sum()
        if costs.overlap == 0:
            return Stalls(self._share((run.reduce_start - compute_end).sum()), 0.0, self._share(drain))
        idle = np.zeros(len(compute_end), dtype=np.int64)
        idle[:-1] = np.where(last[:-1], 0, run.compute_start[1:] - compute_end[:-1])
        # Compute i + 1 waits for the reduce that frees its buffer; what that reduce lost to its turn is the order's fault.
        freeing = np.maximum(np.arange(len(idle)) - costs.overlap, 0)
        turn_wait = self._turn_wait(compute_end)[freeing]
        by_order = np.minimum(idle, turn_wait).sum()
        return Stalls(*(self._share(x) for x in (by_order, idle.sum() - by_order, drain)))

    def _turn_wait(self, compute_end: NDArray[np.int64]) -> NDArray[np.int64]:
        """How long each reduce waited for the turn before it, beyond its own compute and its drain."""
        costs, run = self.machine.costs, self.execution
        drains = max(1, costs.overlap)
        ready = compute_end.copy()
        ready[drains:] = np.maximum(ready[drains:], run.reduce_start[:-drains] + costs.reduce)
        position = np.arange(len(ready)) - np.repeat(run.offsets[:-1], np.diff(run.offsets))
        ready = np.where(position >= drains, ready, compute_end)
        return run.reduce_start - ready

    def _share(self, worker_ticks: int | np.int64) -> float:
        total = self.schedule.workers * self._ticks
        return float(worker_ticks / total) if total else 0.0

    def task(self, index: int) -> Task:
        """The task at a position of the task arrays."""
        ticket = int(np.searchsorted(self.execution.offsets, index, side="right")) - 1
        sequence, part, kv_tile = self.schedule.tickets[ticket].tolist()
        q_tile, _, member = self.schedule.tasks(part, kv_tile)
        place = index - int(self.execution.offsets[ticket])
        return self.schedule.problem.task(sequence, part, kv_tile, int(q_tile[place]), int(member[place]))

    @cached_property
    def critical_path(self) -> list[Hop]:
        """The events that decide the makespan, first to last."""
        return [Hop(self._task_of(*node), node[0], cause) for node, cause in critical_path(self)]

    def _task_of(self, phase: str, index: int) -> Task:
        """An add is named after the last task of its chain; without one, after the first Q tile."""
        if phase != "add":
            return self.task(index)
        ticket = index // self.execution.add_start.shape[1]
        first, end = self.execution.offsets[ticket : ticket + 2].tolist()
        sequence, part, kv_tile = self.schedule.tickets[ticket].tolist()
        return self.task(end - 1) if end > first else self.schedule.problem.task(sequence, part, kv_tile, q_tile=0)


def simulate(schedule: Schedule, machine: Machine | None = None, progress: Progress | None = None) -> Timeline:
    """Run a schedule in model time."""
    machine = Machine() if machine is None else machine
    if schedule.problem.tasks > MOST_TASKS:
        raise ValueError(f"{schedule.problem.tasks:,} tasks are too many to simulate; at most {MOST_TASKS:,} (fewer heads or larger tiles)")
    return Timeline(schedule, machine, run_in_model_time(schedule, machine.costs, progress=progress))
