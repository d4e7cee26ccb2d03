"""What ran when, as plain arrays: all that a picture or a trace of a run needs, whether it was simulated or measured.

Of a measured run: what a kernel or an executor noted of every task, put into the index of the plan.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import RecordError
from ..scheduling.order import neighbours
from ..scheduling.schedule import Schedule
from ..simulation.simulate import Timeline
from .words import percent, plain_number

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
MICROSECONDS = "microseconds"


class TaskTable(NamedTuple):
    """The identity of every task, by ticket and then along the walk: the index of a plan."""

    ticket: Indices
    sequence: Indices
    head: Indices  # query head
    q_tile: Indices
    kv_tile: Indices
    turn: Indices


@dataclass(frozen=True, eq=False)
class TaskTimes:
    """The phases of every task. Tasks of ticket t are offsets[t]:offsets[t + 1] and ran on worker[t].

    `drains` is how many reduces go on behind the computes; 0 means that the worker itself reduces, after each compute.
    """

    name: str
    workers: int
    q_tiles: int
    offsets: Indices
    worker: Indices
    q_tile: Indices
    compute_start: Floats
    compute_end: Floats
    reduce_start: Floats
    reduce_end: Floats
    drains: int = 0
    lower_bound: float | None = None
    notes: str = ""
    time_label: str = "model time"
    source: str = "simulated"  # runs are compared in words only with others of their kind

    @property
    def makespan(self) -> float:
        return float(self.reduce_end.max(initial=0.0))

    @property
    def lanes(self) -> int:
        """Workers that ran something; they are the first ones."""
        return int(self.worker.max(initial=0)) + 1

    @cached_property
    def ticket(self) -> Indices:
        """The chain of every task."""
        return np.repeat(np.arange(len(self.worker)), np.diff(self.offsets))

    @cached_property
    def worker_of_task(self) -> Indices:
        return self.worker[self.ticket]

    @cached_property
    def position(self) -> Indices:
        """The place of every task in its chain."""
        return np.arange(len(self.q_tile)) - self.offsets[self.ticket]

    @cached_property
    def chains(self) -> tuple[Indices, Floats, Floats]:
        """(ticket, start, end) of every chain that has tasks."""
        tickets = np.flatnonzero(np.diff(self.offsets))
        if not len(tickets):
            return tickets, np.zeros(0), np.zeros(0)
        first = self.offsets[tickets]
        return tickets, self.compute_start[first], np.maximum.reduceat(self.reduce_end, first)

    @cached_property
    def waits(self) -> tuple[Floats, Floats]:
        """Start and end of the time that is lost after each task's compute (equal where none is).

        A worker that reduces itself waits for its turn. With reduces in the background it waits for a free buffer,
        and at the end of a chain for the last reduces, unless it can start its next chain before.
        """
        if not self.drains:
            return self.compute_end, self.reduce_start
        until = np.append(self.compute_start[1:], 0.0)[: len(self.compute_end)]
        tickets, start, end = self.chains
        before = chains_before(self.worker[tickets], start)
        follows = before >= 0
        next_start = np.full(len(tickets), np.inf)
        next_start[before[follows]] = start[follows]
        until[self.offsets[tickets + 1] - 1] = np.minimum(end, next_start)
        return self.compute_end, until

    @property
    def stalled(self) -> float:
        """The share of all workers' time that is lost."""
        start, end = self.waits
        return float((end - start).sum()) / (self.workers * self.makespan) if self.makespan else 0.0


def chains_before(worker: Indices, start: Floats) -> Indices:
    """For each chain the place of the one that its worker ran before; -1: there was none."""
    earlier, later = neighbours(worker, start)
    found = np.full(len(worker), -1)
    found[later] = earlier
    return found


class Recorded(NamedTuple):
    """A measured run and the schedule it walked."""

    schedule: Schedule
    spans: TaskTimes


def task_table(schedule: Schedule) -> TaskTable:
    problem = schedule.problem
    chains = [schedule.tasks(part, kv_tile) for _, part, kv_tile in schedule.tickets.tolist()]
    q_tile, turn, member = (np.concatenate(column).astype(np.int64) for column in zip(*chains, strict=True))
    ticket = np.repeat(np.arange(len(chains)), [len(chain[0]) for chain in chains])
    sequence, part, kv_tile = schedule.tickets[ticket].T
    first_member = np.array([problem.members(number).start for number in range(problem.all_parts)])
    return TaskTable(ticket, sequence, first_member[part] + member, q_tile, kv_tile, turn)


def times_of(timeline: Timeline) -> TaskTimes:
    """The spans of a simulated run."""
    run, costs, schedule = timeline.execution, timeline.machine.costs, timeline.schedule
    unit = timeline.machine.ticks_per_unit
    return TaskTimes(
        name=schedule.name,
        workers=schedule.workers,
        q_tiles=schedule.problem.q_tiles,
        offsets=run.offsets,
        worker=run.worker,
        q_tile=task_table(schedule).q_tile,
        compute_start=run.compute_start / unit,
        compute_end=(run.compute_start + costs.compute) / unit,
        reduce_start=run.reduce_start / unit,
        reduce_end=(run.reduce_start + costs.reduce) / unit,
        drains=costs.overlap,
        lower_bound=timeline.lower_bound,
        notes=_notes(timeline),
    )


def _notes(timeline: Timeline) -> str:
    return (
        f"makespan {plain_number(timeline.makespan)}   gap {percent(timeline.gap)}"
        f"   utilised {percent(timeline.utilization)}   stalled {percent(timeline.stalled)}"
    )


class Noted(NamedTuple):
    """Times of every task in microseconds, by ticket and then along the walk, and the worker that ran it."""

    worker: Indices
    compute_start: Floats
    compute_end: Floats
    reduce_start: Floats
    reduce_end: Floats


def times_from(schedule: Schedule, noted: Noted, drains: int) -> TaskTimes:
    """The spans of a measured run, from the moment its first task started."""
    table = task_table(schedule)
    offsets = np.searchsorted(table.ticket, np.arange(schedule.problem.chains + 1))
    first = np.minimum(offsets[:-1], len(table.ticket) - 1)
    worker = np.where(np.diff(offsets) > 0, noted.worker[first], 0)
    strangers = np.flatnonzero(worker[table.ticket] != noted.worker)
    if len(strangers):
        raise RecordError(f"task {strangers[0]} was noted on another worker than the first task of its chain")
    zero = float(noted.compute_start.min())
    times = {name: getattr(noted, name) - zero for name in Noted._fields[1:]}
    name, q_tiles = f"{schedule.name}, measured", schedule.problem.q_tiles
    spans = TaskTimes(name, schedule.workers, q_tiles, offsets, worker, table.q_tile, **times, drains=drains)
    return replace(spans, notes=f"{spans.makespan:,.1f} us   stalled {percent(spans.stalled)}", time_label=MICROSECONDS, source="measured")


class Cycles(NamedTuple):
    """What the drains of the GPU kernel noted of every task: its CTA, and the cycles of that SM's clock."""

    cta: Indices
    ready: Indices
    turn: Indices
    landed: Indices


class Clocks(NamedTuple):
    """Of every CTA: the shared clock in ns and the SM's own in cycles, at one moment at its start and at one at its end."""

    start_ns: Indices
    start_cycles: Indices
    end_ns: Indices
    end_cycles: Indices


def to_microseconds(cycles: Indices, cta: Indices, clocks: Clocks) -> Floats:
    """On the shared clock, from the earliest start of a CTA. The SM's clock has 32 bits and wraps around within seconds."""
    lasted = clocks.end_ns - clocks.start_ns
    if (lasted <= 0).any() or (lasted >= 10**9).any():
        raise RecordError(f"a recorded run must last more than 0 and less than 1 s; a CTA says {lasted.min()} to {lasted.max()} ns")
    per_cycle = lasted / _since(clocks.end_cycles, clocks.start_cycles)
    ns = clocks.start_ns[cta] - clocks.start_ns.min() + _since(cycles, clocks.start_cycles[cta]) * per_cycle[cta]
    return np.asarray(ns / 1000)


def _since(cycles: Indices, start: Indices) -> Indices:
    """Cycles from `start`, a few perhaps before it."""
    return (cycles - start + 2**31) % 2**32 - 2**31


def noted_by_drains(schedule: Schedule, cycles: Cycles, clocks: Clocks, drains: int) -> Noted:
    """The phases of every task, from what a drain sees: dQ ready, turn come, landed.

    A compute ends when its dQ is ready and starts when the one before was, with two exceptions. The first of a chain is
    taken to be as long as usual. And a compute whose staging buffer was still waiting for its turn counts from that turn
    on, if it is then still as long as usual: before, it stalled.
    """
    table = task_table(schedule)
    offsets = np.searchsorted(table.ticket, np.arange(schedule.problem.chains + 1))
    ready, turn, landed = (to_microseconds(x, cycles.cta, clocks) for x in (cycles.ready, cycles.turn, cycles.landed))
    position = np.arange(len(ready)) - offsets[table.ticket]
    follows = position > 0
    before = np.concatenate([[-np.inf], ready[:-1]])
    usual = float(np.median((ready - before)[follows])) if follows.any() else float(np.median(landed - ready))
    freed = np.concatenate([np.full(drains, -np.inf), turn])[: len(turn)]
    freed[position < drains] = -np.inf
    start = np.where(follows, np.maximum(before, np.minimum(freed, ready - usual)), ready - usual)
    first, last = offsets[:-1][np.diff(offsets) > 0], offsets[1:][np.diff(offsets) > 0] - 1
    before_chain = chains_before(cycles.cta[first], ready[first])
    earlier = np.where(before_chain >= 0, ready[last[before_chain]], -np.inf)  # when its CTA had the chain before ready
    start[first] = np.maximum(start[first], earlier)
    return Noted(cycles.cta, start, ready, turn, landed)
