"""The critical path of runs for which the simulator has no exact one: what ended last before each event began."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import TypeVar

import numpy as np

from ...scheduling.schedule import Schedule
from ...simulation.cluster import RankTimeline
from ...simulation.critical_path import Node, turn_predecessors
from ..task_times import TaskTimes, chains_before

TOLERANCE_US = 0.02  # the tile model rounds what links deliver up to a tick
MOST_BESIDE = 64
Place = TypeVar("Place")
Candidate = tuple[float, str, Place | None]  # when it ended, what it is, and where
LATEST = itemgetter(0)


def _back_from(last: Place, cause_of: Callable[[Place], tuple[str, Place | None]]) -> list[tuple[Place, str]]:
    """From first to last: what happened, and what it waited for."""
    place: Place | None = last
    found = []
    while place is not None:
        cause, before = cause_of(place)
        found.append((place, cause))
        place = before
    return found[::-1]


def path_of_record(schedule: Schedule, times: TaskTimes) -> list[tuple[Node, str]]:
    """A measurement has no exact ties, so the latest of all that an event needs counts as its cause."""
    if not len(times.q_tile):
        return []
    needed = _Needs(schedule, times)
    return _back_from(("reduce", int(np.argmax(times.reduce_end))), lambda node: max(needed(*node), key=LATEST)[1:])


class _Needs:
    """What each phase of a recorded task needs."""

    def __init__(self, schedule: Schedule, times: TaskTimes) -> None:
        self.times, self.turn_before = times, turn_predecessors(schedule)
        tickets, start, _ = times.chains
        before = chains_before(times.worker[tickets], start)
        self.chain_before = {int(ticket): int(tickets[place]) for ticket, place in zip(tickets, before, strict=True) if place >= 0}

    def __call__(self, phase: str, index: int) -> Iterator[Candidate[Node]]:
        place, drains = int(self.times.position[index]), self.times.drains
        if phase == "reduce":
            yield float(self.times.compute_end[index]), "compute", ("compute", index)
            if (rival := int(self.turn_before[index])) >= 0:
                yield self._reduced(rival, "turn")
            if place >= max(1, drains):
                yield self._reduced(index - max(1, drains), "drain")
        elif place == 0:
            before = self.chain_before.get(int(self.times.ticket[index]))
            yield (0.0, "start", None) if before is None else self._reduced(self._last_of(before), "worker")
        else:
            yield float(self.times.compute_end[index - 1]), "compute", ("compute", index - 1)
            if place - 1 - drains >= 0:
                yield self._reduced(index - 1 - drains, "buffer")

    def _reduced(self, index: int, cause: str) -> Candidate[Node]:
        return float(self.times.reduce_end[index]), cause, ("reduce", index)

    def _last_of(self, ticket: int) -> int:
        """The task of a chain whose reduce ended last."""
        first, end = self.times.offsets[ticket : ticket + 2].tolist()
        return int(first + np.argmax(self.times.reduce_end[first:end]))


def path_of_ranks(run: RankTimeline) -> list[tuple[int, str]]:
    """Numbers of units, each with what its start waited for: states, turns, rank, keys or nothing (start)."""
    return _back_from(int(np.argmax(run.end)), lambda number: _cause_of_start(run, number)) if len(run.end) else []


def _cause_of_start(run: RankTimeline, number: int) -> tuple[str, int | None]:
    """What ended last before a unit started. All that it may wait for has lower numbers, so a path ends."""
    unit, start = run.shared.units[number], float(run.start[number])
    earlier = _earlier_on_rank(run, number)
    candidates: list[Candidate[int]] = [(0.0, "start", None)]
    candidates += [(float(run.end[other]), "rank", other) for other in earlier]
    candidates += [(float(run.end[other]), "turns", other) for other in run.shared.waits[number]]
    if unit.before is not None:
        candidates.append((float(run.arrival[number]), "states", unit.before))
    latest, cause, before = max((c for c in candidates if c[0] <= start + TOLERANCE_US), key=LATEST)
    if start <= latest + TOLERANCE_US:
        return cause, before
    beside = [other for other in earlier if run.end[other] > start]  # overlapped: its workers became free one by one
    return ("rank", beside[-1]) if beside else ("keys", None)


def _earlier_on_rank(run: RankTimeline, number: int) -> list[int]:
    """Units of the same rank before this one. The last ones are all that can have held its workers."""
    mine = [unit.number for unit in run.shared.by_rank[run.shared.units[number].rank]]
    place = bisect_left(mine, number)
    return mine[max(0, place - MOST_BESIDE) : place]
