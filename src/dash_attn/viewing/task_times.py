"""What ran when, as plain arrays: all that a picture or a trace of a run needs, whether it was simulated or measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..scheduling.schedule import Schedule
from ..simulation.simulate import Timeline
from .words import percent, plain_number

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


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
    order = np.lexsort((start, worker))
    same = worker[order[1:]] == worker[order[:-1]]
    found = np.full(len(worker), -1)
    found[order[1:][same]] = order[:-1][same]
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
