"""A run of several ranks that share a sequence as JSON: what a chart needs of every unit, in nanoseconds."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...scheduling.order import members
from ...scheduling.ranks.units import SharedSchedule, Unit
from ...simulation.cluster import RankTimeline
from ..recorded import MICROSECONDS
from ..words import bytes_in_words
from .packing import packed
from .paths import path_of_ranks
from .runs import NANOSECONDS

CAUSES = ("start", "rank", "states", "turns", "keys")
MOST_UNITS = 200_000
NONE = -1


def shared_run(run: RankTimeline) -> dict[str, Any]:
    shared = run.shared
    if len(shared.units) > MOST_UNITS:
        raise ValueError(f"a page shows at most {MOST_UNITS:,} units; got {len(shared.units):,} (more --heads-together, or fewer heads)")
    return {
        "kind": "units",
        "name": f"{shared.schedule.name}, {run.execution}",
        "source": "simulated",
        "unit": MICROSECONDS,
        "ticks": NANOSECONDS,
        "workers": run.ranks,
        "lanes": run.ranks,
        "makespan": round(run.makespan * NANOSECONDS),
        "lower_bound": None,
        "figures": _figures(run),
        "units": _units(run),
        "waits": _waits(shared),
        "path": _path(run),
    }


def _figures(run: RankTimeline) -> list[list[str]]:
    return [
        ["makespan", f"{run.makespan:,.0f} us"],
        ["one rank", f"{run.one_rank:,.0f} us"],
        ["efficiency", f"{run.efficiency:.3f}"],
        ["hops", str(max(run.hops))],
        ["sent forward", bytes_in_words(max(run.gathered))],
        ["sent backward", bytes_in_words(max(run.sent))],
        ["states waiting", f"{max(run.waiting)} ({bytes_in_words(max(run.waiting_bytes))})"],
        ["model", run.model],
    ]


def _units(run: RankTimeline) -> dict[str, Any]:
    shared = run.shared
    names, heads = _Texts(), _Texts()
    rows = [
        (
            unit.rank,
            unit.kind,
            shared.column_of(unit).chunk,
            NONE if unit.leg is None else shared.leg_of(unit).chunk,
            shared.tasks_of(unit),
            NONE if unit.before is None else unit.before,
            NONE if unit.after is None else unit.after,
            names.number_of(shared.describe(unit)),
            heads.number_of(_heads(shared, unit)),
        )
        for unit in shared.units
    ]
    columns = ("rank", "kind", "keys", "queries", "tasks", "before", "after", "name", "heads")
    table = np.array(rows, dtype=np.int64).reshape(-1, len(columns)).T
    times = {name: packed(_ticks(getattr(run, name))) for name in ("start", "end", "arrival")}
    return {
        **{name: packed(column) for name, column in zip(columns, table, strict=True)},
        **times,
        "names": names.all,
        "heads_of": heads.all,
    }


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


class _Texts:
    """Each text once, by number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number_of(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))

    @property
    def all(self) -> list[str]:
        return list(self.numbers)


def _waits(shared: SharedSchedule) -> dict[str, str]:
    """For turns, without the unit that the states come from: how many per unit, and which."""
    found = [[other for other in waits if other != unit.before] for unit, waits in zip(shared.units, shared.waits, strict=True)]
    return {
        "count": packed(np.array([len(each) for each in found], dtype=np.int64)),
        "unit": packed(np.array([other for each in found for other in each], dtype=np.int64)),
    }


def _path(run: RankTimeline) -> dict[str, Any]:
    events = path_of_ranks(run)
    columns = {
        "phase": [0] * len(events),
        "index": [number for number, _ in events],
        "cause": [CAUSES.index(cause) for _, cause in events],
    }
    return {"causes": list(CAUSES), **{name: packed(np.array(column, dtype=np.int64)) for name, column in columns.items()}}


def _ticks(times: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.rint(times * NANOSECONDS).astype(np.int64)
