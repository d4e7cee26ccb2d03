"""Runs as JSON, in whole ticks: what a chart needs of every task of one rank, or of every unit of several that share a sequence.

Where the simulator has no exact critical path, the page finds one: what came last before each event began.
"""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...scheduling.order import members
from ...scheduling.ranks.units import SharedSchedule, Unit
from ...scheduling.schedule import Schedule
from ...simulation.cluster import RankTimeline
from ...simulation.critical_path import critical_path
from ...simulation.simulate import Timeline
from ..gantt_ranks import lanes_of
from ..task_times import MICROSECONDS, TaskTimes, task_table, times_of
from ..words import figures_of, figures_of_ranks, label_of, percent

MOST_TASKS = 2_000_000  # of a run: about 30 MB, and a second until it is drawn
MOST_UNITS = 200_000
PHASES = ("compute", "reduce", "add")
CAUSES = ("start", "worker", "compute", "buffer", "drain", "turn")
NANOSECONDS = 1000  # of a microsecond: ticks of a recording, and of ranks
NONE = -1
# Letters of the types that the page knows (page/data.js), smallest first. float64 holds whole numbers up to 2^53.
TYPES = {"B": "u1", "H": "<u2", "i": "<i4", "d": "<f8"}
EXACT = 2**53
Answer = dict[str, Any]
Ticks = NDArray[np.int64]


def check_size(tasks: int) -> None:
    if tasks > MOST_TASKS:
        raise ValueError(f"a page shows at most {MOST_TASKS:,} tasks per schedule; got {tasks:,} (fewer or larger tiles, or fewer heads)")


def simulated(timeline: Timeline, name: str) -> Answer:
    """`name`: as it was asked for."""
    run, costs, ticks = timeline.execution, timeline.machine.costs, timeline.machine.ticks_per_unit
    return {
        **_tasks(timeline.schedule, times_of(timeline), ticks, (run.chain_start, run.chain_end)),
        "name": label_of(name, timeline.schedule.name),
        "makespan": int(run.chain_end.max(initial=0)),  # behind all adds, too
        "lower_bound": float(timeline.bounds.best),
        "hand_over": max(costs.reduce, costs.latency),
        "figures": list(map(list, figures_of(timeline).items())),
        "adds": {"count": run.add_start.shape[1], "start": encoded(run.add_start.ravel()), "reduce": costs.reduce},
        "path": _path(timeline),
    }


def recorded(schedule: Schedule, spans: TaskTimes) -> Answer:
    start, end = np.zeros(len(spans.worker)), np.zeros(len(spans.worker))
    tickets, start[tickets], end[tickets] = spans.chains
    return {
        **_tasks(schedule, spans, NANOSECONDS, (_ticks(start), _ticks(end))),
        "name": spans.name,
        "makespan": round(spans.makespan * NANOSECONDS),
        "lower_bound": None,
        "hand_over": None,
        "figures": [["makespan", f"{spans.makespan:,.1f} us"], ["stalled", percent(spans.stalled)]],
        "adds": {"count": 0, "start": encoded([]), "reduce": 0},
    }


def _tasks(schedule: Schedule, spans: TaskTimes, ticks: int, chains: tuple[Ticks, Ticks]) -> Answer:
    """`chains`: start and end of each."""
    check_size(schedule.problem.tasks)
    sequence, _, kv_tile = schedule.tickets.T
    columns = {"tasks": np.diff(spans.offsets), "worker": spans.worker, "sequence": sequence, "kv_tile": kv_tile}
    return {
        "kind": "tasks",
        "schedule": schedule.name,
        "source": spans.source,
        "unit": spans.time_label,
        "ticks": ticks,
        "workers": spans.workers,
        "lanes": spans.lanes,
        "drains": spans.drains,
        "q_tiles": schedule.problem.q_tiles,
        "kv_tiles": schedule.problem.kv_tiles,
        "partial": encoded(np.flatnonzero(schedule.problem.partial)),
        "heads": schedule.problem.heads * schedule.problem.group,
        "chains": _columns(**columns, start=chains[0], end=chains[1]),
        "tasks": _task_columns(schedule, spans, ticks),
    }


def _task_columns(schedule: Schedule, spans: TaskTimes, ticks: int) -> Answer:
    """Small numbers compress well: durations and delays stand in for times, where they can."""
    table = task_table(schedule)
    compute_start, compute_end, reduce_start, reduce_end, lost_until = (
        _ticks(times, ticks) for times in (spans.compute_start, spans.compute_end, spans.reduce_start, spans.reduce_end, spans.waits[1])
    )
    return _columns(
        q_tile=table.q_tile,
        turn=table.turn,
        head=table.head,
        compute_start=compute_start,
        compute=compute_end - compute_start,
        delay=reduce_start - compute_end,  # until the reduce starts
        reduce=reduce_end - reduce_start,
        lost=np.maximum(lost_until - compute_end, 0),  # what the worker waits after the compute
    )


def check_units(shared: SharedSchedule) -> None:
    if len(shared.units) > MOST_UNITS:
        raise ValueError(f"a page shows at most {MOST_UNITS:,} units; got {len(shared.units):,} (more --heads-together, or fewer heads)")


def shared_run(run: RankTimeline) -> Answer:
    """Of several ranks. Endings have no chunk of queries."""
    shared = run.shared
    # For turns, without the unit that the states come from.
    waits = [[other for other in waits if other != unit.before] for unit, waits in zip(shared.units, shared.waits, strict=True)]
    return {
        "kind": "units",
        "schedule": shared.schedule.name,
        "name": f"{shared.schedule.name}, {run.execution}",
        "source": "simulated",
        "unit": MICROSECONDS,
        "ticks": NANOSECONDS,
        "workers": run.ranks,
        "makespan": round(run.makespan * NANOSECONDS),
        "lower_bound": None,
        "figures": list(map(list, figures_of_ranks(run).items())),
        "units": _units(run),
        "waits": _columns(count=[len(each) for each in waits], unit=[other for each in waits for other in each]),
    }


def _units(run: RankTimeline) -> Answer:
    """`heads` tells texts of `heads_of` apart."""
    shared, units = run.shared, run.shared.units
    times = {name: _ticks(getattr(run, name)) for name in ("start", "end", "arrival")}
    lasting = [[unit for unit in there if times["end"][unit.number] > times["start"][unit.number]] for there in shared.by_rank]
    lanes = lanes_of(lasting, times["start"], times["end"])
    heads = [_heads(shared, unit) for unit in units]
    number = {text: place for place, text in enumerate(dict.fromkeys(heads))}
    return {"does": [shared.describe(unit) for unit in units], "heads_of": heads} | _columns(
        rank=[unit.rank for unit in units],
        lane=[lanes.get(unit.number, 0) for unit in units],
        kind=[unit.kind for unit in units],
        keys=[shared.column_of(unit).chunk for unit in units],
        queries=[NONE if unit.leg is None else shared.leg_of(unit).chunk for unit in units],
        tasks=[shared.tasks_of(unit) for unit in units],
        before=[NONE if unit.before is None else unit.before for unit in units],
        after=[NONE if unit.after is None else unit.after for unit in units],
        heads=[number[text] for text in heads],
        **times,
    )


def _heads(shared: SharedSchedule, unit: Unit) -> str:
    """The query heads it walks for; those of an ending are KV heads."""
    words = []
    for sequence, part in unit.heads:
        there = shared.problem.members(part)
        if unit.leg is None:
            name = f"KV head {part // shared.problem.parts}"
        else:
            last_first = shared.schedule.order.kinds[unit.kind].last_member_first
            name = f"h{there.start + int(members(len(there), last_first)[unit.member])}"
        words.append(f"b{sequence}.{name}" if sequence else name)
    return ", ".join(words)


def encoded(values: NDArray[Any] | Sequence[int]) -> str:
    """Whole numbers in the smallest type that holds them: its letter, then the bytes in base64."""
    numbers = np.asarray(values, dtype=np.int64)
    least, most = int(numbers.min(initial=0)), int(numbers.max(initial=0))
    if max(-least, most) > EXACT:
        raise OverflowError(f"{max(-least, most)} ticks are too many for a page")
    letter = next(letter for letter, kind in TYPES.items() if letter == "d" or (np.iinfo(kind).min <= least and most <= np.iinfo(kind).max))
    return letter + base64.b64encode(numbers.astype(TYPES[letter]).tobytes()).decode()


def _columns(**columns: Ticks | Sequence[int]) -> Answer:
    return {name: encoded(column) for name, column in columns.items()}


def _ticks(times: NDArray[np.float64], ticks: int = NANOSECONDS) -> Ticks:
    whole: Ticks = np.rint(times * ticks).astype(np.int64)
    return whole


def _path(timeline: Timeline) -> Answer:
    events = critical_path(timeline)
    columns = _columns(
        phase=[PHASES.index(phase) for (phase, _), _ in events],
        index=[index for (_, index), _ in events],
        cause=[CAUSES.index(cause) for _, cause in events],
    )
    return {"causes": list(CAUSES), **columns}
