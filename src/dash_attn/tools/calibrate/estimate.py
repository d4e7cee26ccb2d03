"""Constants read straight off measured spans: medians of what each of them means. Where a fit starts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...scheduling.schedule import Schedule
from ...simulation.simulate import Machine
from ...viewing.task_times import Floats, Indices, TaskTimes, task_table
from .fit import DIGITS

WAITED = 0.2  # of a compute: a reduce that started later than that after its compute has waited for its turn

Run = tuple[Schedule, TaskTimes]


def estimate(runs: Sequence[Run]) -> Machine:
    """Of all runs together. Without any wait a hand-over cannot be seen; it then counts as long as a reduce."""
    if not runs:
        raise ValueError("nothing to estimate from: at least one measured run is needed")
    compute = _median([spans.compute_end - spans.compute_start for _, spans in runs])
    reduce = _median([spans.reduce_end - spans.reduce_start for _, spans in runs])
    latency = _median([_hand_overs(schedule, spans, WAITED * compute) for schedule, spans in runs], otherwise=reduce)
    startup = max(0.0, _median([_starts(spans) for _, spans in runs], otherwise=0.0))
    rounded = (round(value, DIGITS) for value in (compute, reduce, latency, startup))
    compute, reduce, latency, startup = rounded
    return Machine(compute, reduce, runs[0][1].drains, latency, startup)


def _median(values: Sequence[Floats], otherwise: float | None = None) -> float:
    pooled = np.concatenate(values)
    if not len(pooled) and otherwise is not None:
        return otherwise
    return float(np.median(pooled))


def _hand_overs(schedule: Schedule, spans: TaskTimes, waited: float) -> Floats:
    """From the start of a reduce to the start of the next turn's, where that one waited for it."""
    before = _turn_before(schedule)
    has_one = before >= 0
    late = has_one & (spans.reduce_start - spans.compute_end > waited)
    return spans.reduce_start[late] - spans.reduce_start[before[late]]


def _turn_before(schedule: Schedule) -> Indices:
    """The task with the next lower turn on the same dQ tile; -1 for turn 0."""
    table, problem = task_table(schedule), schedule.problem
    tile = (table.sequence * problem.heads * problem.group + table.head) * problem.q_tiles + table.q_tile
    order = np.lexsort((table.turn, tile))
    same = tile[order[1:]] == tile[order[:-1]]
    before = np.full(len(tile), -1)
    before[order[1:][same]] = order[:-1][same]
    return before


def _starts(spans: TaskTimes) -> Floats:
    """From the end of a chain to the first compute of the next one on its worker."""
    tickets, start, end = spans.chains
    worker = spans.worker[tickets]
    order = np.lexsort((start, worker))
    same = worker[order[1:]] == worker[order[:-1]]
    between: Floats = start[order[1:][same]] - end[order[:-1][same]]
    return between
