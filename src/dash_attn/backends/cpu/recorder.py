"""One backward on the CPU in real threads, with the times of every task: a measured Gantt chart without a GPU."""

import numpy as np

from ...call.call import Call, Grads, Saved
from ...call.parts import runs_packed
from ...call.planning import problem_of, schedule_for
from ...errors import RecordError
from ...execution.interleaving import TaskTime, interleaving
from ...scheduling.schedule import Schedule
from ...viewing.task_times import Noted, TaskTimes, task_table, times_from
from .passes import backward
from .tiles import TILE_KV, TILE_Q


def record_backward(call: Call, saved: Saved, grads: Grads, workers: int) -> TaskTimes:
    """Run one backward on `workers` threads and tell when every task ran. Times are microseconds."""
    if runs_packed(call.options):  # what runs must be what the schedule says
        raise ValueError("documents run one by one, each with an order of its own; name a schedule to record the whole mask")
    # Before anything runs: a chart shows whole chains, so workers that are too few for them are refused here.
    schedule = schedule_for(problem_of(call, TILE_Q, TILE_KV), call.options.schedule, workers)
    record: list[TaskTime] = []
    with interleaving(None, threads=True, workers=workers, record=record):
        backward(call, saved, grads)
    return read_record(schedule, record)


def read_record(schedule: Schedule, record: list[TaskTime]) -> TaskTimes:
    """TaskTimes from the rows of a record, which come in any order."""
    rows = {tuple(row.task): row for row in record}
    table = task_table(schedule)
    tasks = list(zip(*(x.tolist() for x in (table.head, table.q_tile, table.kv_tile, table.sequence)), strict=True))
    if len(rows) != len(record) or set(rows) != set(tasks):
        raise RecordError(f"{len(record)} tasks were noted; the schedule has {len(tasks)}, or others")
    found = [rows[task] for task in tasks]
    times = np.array([row[2:] for row in found]) * 1e6
    return times_from(schedule, Noted(np.array([row.worker for row in found]), *times.T), drains=0)
