"""Measured runs as spans: what a kernel or an executor noted of every task, put into the index of the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import RecordError
from ..scheduling.schedule import Schedule
from .task_times import Floats, Indices, TaskTable, TaskTimes, chains_before, task_table
from .words import percent

MICROSECONDS = "microseconds"


class Noted(NamedTuple):
    """Times of every task in microseconds, by ticket and then along the walk, and the worker that ran it."""

    worker: Indices
    compute_start: Floats
    compute_end: Floats
    reduce_start: Floats
    reduce_end: Floats


def times_from(schedule: Schedule, noted: Noted, drains: int, suffix: str = ", measured") -> TaskTimes:
    """The spans of a measured run, from the moment its first task started."""
    table = task_table(schedule)
    offsets = chain_offsets(schedule, table)
    first = np.minimum(offsets[:-1], len(table.ticket) - 1)
    worker = np.where(np.diff(offsets) > 0, noted.worker[first], 0)
    strangers = np.flatnonzero(worker[table.ticket] != noted.worker)
    if len(strangers):
        raise RecordError(f"task {strangers[0]} was noted on another worker than the first task of its chain")
    zero = float(noted.compute_start.min())
    times = {name: getattr(noted, name) - zero for name in Noted._fields[1:]}
    spans = TaskTimes(
        schedule.name + suffix, schedule.workers, schedule.problem.q_tiles, offsets, worker, table.q_tile, **times, drains=drains
    )
    return replace(spans, notes=f"{spans.makespan:,.1f} us   stalled {percent(spans.stalled)}", time_label=MICROSECONDS, source="measured")


def chain_offsets(schedule: Schedule, table: TaskTable) -> Indices:
    return np.concatenate([[0], np.cumsum(np.bincount(table.ticket, minlength=schedule.problem.chains))])


class Cycles(NamedTuple):
    """What the drains of the GPU kernel noted of every task: its CTA, and the cycles of that SM's clock."""

    cta: NDArray[np.int64]
    ready: NDArray[np.int64]
    turn: NDArray[np.int64]
    landed: NDArray[np.int64]


class Clocks(NamedTuple):
    """Of every CTA: the shared clock in ns and the SM's own in cycles, at one moment at its start and at one at its end."""

    start_ns: NDArray[np.int64]
    start_cycles: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    end_cycles: NDArray[np.int64]


def to_microseconds(cycles: NDArray[np.int64], cta: NDArray[np.int64], clocks: Clocks) -> Floats:
    """On the shared clock, from the earliest start of a CTA. The SM's clock has 32 bits and wraps around within seconds."""
    lasted = clocks.end_ns - clocks.start_ns
    if (lasted <= 0).any() or (lasted >= 10**9).any():
        raise RecordError(f"a recorded run must last more than 0 and less than 1 s; a CTA says {lasted.min()} to {lasted.max()} ns")
    per_cycle = lasted / _since(clocks.end_cycles, clocks.start_cycles)
    ns = clocks.start_ns[cta] - clocks.start_ns.min() + _since(cycles, clocks.start_cycles[cta]) * per_cycle[cta]
    return np.asarray(ns / 1000)


def _since(cycles: NDArray[np.int64], start: NDArray[np.int64]) -> NDArray[np.int64]:
    """Cycles from `start`, a few perhaps before it."""
    return (cycles - start + 2**31) % 2**32 - 2**31


def noted_by_drains(schedule: Schedule, cycles: Cycles, clocks: Clocks, drains: int) -> Noted:
    """The phases of every task, from what a drain sees: dQ ready, turn come, landed.

    A compute ends when its dQ is ready and starts when the one before was, with two exceptions. The first of a chain is
    taken to be as long as usual. And a compute whose staging buffer was still waiting for its turn counts from that turn
    on, if it is then still as long as usual: before, it stalled.
    """
    table = task_table(schedule)
    offsets = chain_offsets(schedule, table)
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
