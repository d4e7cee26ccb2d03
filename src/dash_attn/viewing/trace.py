"""A run as a Chrome trace, to be opened in Perfetto or chrome://tracing.

Every schedule is a process and every worker a thread with compute, reduce and waiting slices. Reduces that go on
behind the computes get threads of their own, one per drain, because slices of a thread must not overlap. One unit of
model time is shown as one microsecond, as measured times are.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..scheduling.engine import Progress
from ..scheduling.problem import Task
from ..simulation.simulate import Timeline
from .task_times import Recorded, TaskTimes, task_table, times_of
from .words import describe_machine, describe_problem

Event = dict[str, Any]


def write_trace(runs: Sequence[Timeline | Recorded], path: str | Path, progress: Progress | None = None) -> None:
    """Write one trace with one process per run. Events are written as they are made: a large run has millions."""
    total = sum(run.schedule.problem.tasks for run in runs)
    done = 0
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ns","traceEvents":[\n')
        separator = ""
        for process, run in enumerate(runs, start=1):
            for event in trace_events(run, process):
                file.write(separator + json.dumps(event, separators=(",", ":")))
                separator = ",\n"
                done += event.get("cat") == "compute"
                if progress is not None and done % 4096 == 0:
                    progress(done, total)
        file.write("\n]}\n")


def trace_events(run: Timeline | Recorded, process: int = 1) -> Iterator[Event]:
    """Names of the tracks, then the slices of every task in plan order."""
    schedule, spans = (run.schedule, times_of(run)) if isinstance(run, Timeline) else run
    machine = f", {describe_machine(run.machine, spans.workers)}" if isinstance(run, Timeline) else ""
    yield from _track_names(f"{spans.name}: {describe_problem(schedule.problem)}{machine}", spans, process)
    table = task_table(schedule)
    times = (spans.compute_start, spans.compute_end, *spans.waits, spans.reduce_start, spans.reduce_end)
    rows = zip(*(column.tolist() for column in (*table, spans.worker_of_task, spans.position, *times)), strict=True)
    for ticket, sequence, head, q_tile, kv_tile, turn, worker, position, *when in rows:
        name = str(Task(head, q_tile, kv_tile, sequence))
        chain_name = f"h{head // schedule.problem.group}.kv{kv_tile}"
        chain_name = f"b{sequence}.{chain_name}" if sequence else chain_name
        args = {"turn": turn, "chain": chain_name, "ticket": ticket, "step": position}
        thread = _thread(spans, worker)
        drain = thread + 1 + position % spans.drains if spans.drains else thread
        compute_start, compute_end, wait_start, wait_end, reduce_start, reduce_end = when
        yield _slice(name, "compute", (process, thread), (compute_start, compute_end), args)
        if wait_end > wait_start:
            yield _slice("wait", "wait", (process, thread), (wait_start, wait_end), {"after": name})
        yield _slice(f"{name} reduce", "reduce", (process, drain), (reduce_start, reduce_end), {"turn": turn, "chain": chain_name})


def _thread(spans: TaskTimes, worker: int) -> int:
    return 1 + worker * (1 + spans.drains)  # thread 0 means the idle thread to some viewers


def _track_names(name: str, spans: TaskTimes, process: int) -> Iterator[Event]:
    yield _meta("process_name", (process, 0), {"name": name})
    for worker in sorted(set(spans.worker.tolist())):
        thread = _thread(spans, worker)
        names = [f"worker {worker}"] + [f"worker {worker} reduces {drain}" for drain in range(spans.drains)]
        for track, track_name in enumerate(names, start=thread):
            yield _meta("thread_name", (process, track), {"name": track_name})
            yield _meta("thread_sort_index", (process, track), {"sort_index": track})


def _meta(kind: str, track: tuple[int, int], args: Event) -> Event:
    return {"ph": "M", "name": kind, "pid": track[0], "tid": track[1], "args": args}


def _slice(name: str, category: str, track: tuple[int, int], when: tuple[float, float], args: Event) -> Event:
    start, end = when
    lasted = round(end - start, 6)  # hides the last bit of the subtraction, which would make neighbours seem to overlap
    return {"ph": "X", "name": name, "cat": category, "pid": track[0], "tid": track[1], "ts": start, "dur": lasted, "args": args}
