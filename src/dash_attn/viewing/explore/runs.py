"""A simulated or measured run of one device as JSON: what a chart needs of every task, in whole ticks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...scheduling.schedule import Schedule
from ...simulation.critical_path import critical_path
from ...simulation.simulate import Timeline
from ..task_times import TaskTable, TaskTimes, task_table, times_of
from ..words import percent, plain_number
from .packing import packed
from .paths import Event, path_of_record

MOST_TASKS = 2_000_000  # of a run: about 30 MB, and a second until it is drawn
PHASES = ("compute", "reduce", "add")
CAUSES = ("start", "worker", "compute", "buffer", "drain", "turn")
NANOSECONDS = 1000  # of a microsecond: ticks of a recording
Answer = dict[str, Any]


def check_size(tasks: int) -> None:
    if tasks > MOST_TASKS:
        raise ValueError(
            f"a page shows at most {MOST_TASKS:,} tasks per schedule; got {tasks:,} (fewer tokens, fewer heads or larger tiles)"
        )


def simulated(timeline: Timeline, name: str) -> Answer:
    """`name`: as it was asked for."""
    check_size(timeline.schedule.problem.tasks)
    run, costs, spans = timeline.execution, timeline.machine.costs, times_of(timeline)
    label = f"auto: {timeline.schedule.name}" if name == "auto" else timeline.schedule.name
    return {
        **_about(label, timeline.schedule, spans, timeline.machine.ticks_per_unit),
        "makespan": int(run.chain_end.max(initial=0)),  # behind all adds, too
        "lower_bound": float(timeline.bounds.best),
        "hand_over": max(costs.reduce, costs.latency),
        "figures": _figures(timeline),
        "chains": _chains(timeline.schedule, spans, run.chain_start, run.chain_end),
        "tasks": _tasks(task_table(timeline.schedule), spans, timeline.machine.ticks_per_unit),
        "adds": {"count": run.add_start.shape[1], "start": packed(run.add_start.ravel()), "reduce": costs.reduce},
        "path": _path(critical_path(timeline)),
    }


def recorded(schedule: Schedule, spans: TaskTimes) -> Answer:
    check_size(schedule.problem.tasks)
    start, end = np.zeros(len(spans.worker)), np.zeros(len(spans.worker))
    tickets, start[tickets], end[tickets] = spans.chains
    table = task_table(schedule)
    return {
        **_about(spans.name, schedule, spans, NANOSECONDS),
        "lower_bound": None,
        "hand_over": None,
        "figures": [["makespan", f"{spans.makespan:,.1f} us"], ["stalled", percent(_stalled(spans))]],
        "chains": _chains(schedule, spans, _ticks(start, NANOSECONDS), _ticks(end, NANOSECONDS)),
        "tasks": _tasks(table, spans, NANOSECONDS),
        "adds": {"count": 0, "start": packed(np.zeros(0)), "reduce": 0},
        "path": _path(path_of_record(schedule, spans)),
    }


def _about(label: str, schedule: Schedule, spans: TaskTimes, ticks: int) -> Answer:
    problem = schedule.problem
    return {
        "kind": "tasks",
        "name": label,
        "source": spans.source,
        "unit": spans.time_label,
        "ticks": ticks,
        "workers": spans.workers,
        "lanes": int(spans.worker.max(initial=0)) + 1,
        "drains": spans.drains,
        "q_tiles": problem.q_tiles,
        "heads": problem.heads * problem.group,
        "makespan": round(spans.makespan * ticks),
    }


def _figures(timeline: Timeline) -> list[list[str]]:
    """(name, value) in words, as the table of `dash-attn plan` has them."""
    stalls = timeline.stalls
    slack = timeline.schedule.slack
    return [
        ["makespan", plain_number(timeline.makespan)],
        ["lower bound", plain_number(timeline.lower_bound)],
        ["gap", percent(timeline.gap)],
        ["utilised", percent(timeline.utilization)],
        ["stalled", percent(timeline.stalled)],
        ["for turns", percent(stalls.order)],
        ["for buffers", percent(stalls.buffer)],
        ["for last reduces", percent(stalls.drain)],
        ["slack", "-" if slack is None else str(slack)],
        ["gang", str(timeline.schedule.gang)],
    ]


def _stalled(spans: TaskTimes) -> float:
    start, end = spans.waits
    return float((end - start).sum()) / (spans.workers * spans.makespan) if spans.makespan else 0.0


def _chains(schedule: Schedule, spans: TaskTimes, start: NDArray[np.int64], end: NDArray[np.int64]) -> Answer:
    sequence, _, kv_tile = schedule.tickets.T
    columns = {"tasks": np.diff(spans.offsets), "worker": spans.worker, "sequence": sequence, "kv_tile": kv_tile}
    return {name: packed(column) for name, column in {**columns, "start": start, "end": end}.items()}


def _tasks(table: TaskTable, spans: TaskTimes, ticks: int) -> Answer:
    """Small numbers compress well: durations and delays stand in for times, where they can."""
    compute_start, compute_end, reduce_start, reduce_end, lost_until = (
        _ticks(times, ticks) for times in (spans.compute_start, spans.compute_end, spans.reduce_start, spans.reduce_end, spans.waits[1])
    )
    columns = {
        "q_tile": table.q_tile,
        "turn": table.turn,
        "head": table.head,
        "compute_start": compute_start,
        "compute": _one_or_all(compute_end - compute_start),
        "delay": reduce_start - compute_end,  # until the reduce starts
        "reduce": _one_or_all(reduce_end - reduce_start),
        "lost": np.maximum(lost_until - compute_end, 0),  # what the worker waits after the compute
    }
    return {name: packed(column) for name, column in columns.items()}


def _one_or_all(durations: NDArray[np.int64]) -> NDArray[np.int64]:
    """One number, where all are equal."""
    return durations[:1] if len(durations) and (durations == durations[0]).all() else durations


def _ticks(times: NDArray[np.float64], ticks: int) -> NDArray[np.int64]:
    whole: NDArray[np.int64] = np.rint(times * ticks).astype(np.int64)
    return whole


def _path(events: Sequence[Event]) -> Answer:
    columns = {
        "phase": [PHASES.index(phase) for (phase, _), _ in events],
        "index": [index for (_, index), _ in events],
        "cause": [CAUSES.index(cause) for _, cause in events],
    }
    return {"causes": list(CAUSES), **{name: packed(np.array(column, dtype=np.int64)) for name, column in columns.items()}}
