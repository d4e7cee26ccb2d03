"""The critical path of runs for which the simulator has no exact one: what ended last before each event began."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from ...scheduling.schedule import Schedule
from ...simulation.cluster import RankTimeline
from ...simulation.critical_path import Node, turn_predecessors
from ..task_times import Indices, TaskTimes

Event = tuple[Node, str]  # what happened, and what it waited for
TOLERANCE_US = 0.02  # the tile model rounds what links deliver up to a tick
MOST_BESIDE = 64
Candidate = tuple[float, str, Node | None]  # when that ended


def path_of_record(schedule: Schedule, times: TaskTimes) -> list[Event]:
    """From first to last. A measurement has no exact ties, so the latest of all that an event needs counts as its cause."""
    return _Record(schedule, times).path() if len(times.q_tile) else []


class _Record:
    def __init__(self, schedule: Schedule, times: TaskTimes) -> None:
        self.times, self.turn_before = times, turn_predecessors(schedule)
        self.last_before = _last_tasks_before(times)

    def path(self) -> list[Event]:
        node: Node | None = ("reduce", int(np.argmax(self.times.reduce_end)))
        found = []
        while node is not None:
            _, cause, before = max(self._needed(*node), key=lambda candidate: candidate[0])
            found.append((node, cause))
            node = before
        return found[::-1]

    def _needed(self, phase: str, index: int) -> Iterator[Candidate]:
        place, drains = int(self.times.position[index]), self.times.drains
        if phase == "reduce":
            yield float(self.times.compute_end[index]), "compute", ("compute", index)
            if (rival := int(self.turn_before[index])) >= 0:
                yield self._reduced(rival, "turn")
            if place >= max(1, drains):
                yield self._reduced(index - max(1, drains), "drain")
        elif place == 0:
            before = int(self.last_before[self.times.ticket[index]])
            yield self._reduced(before, "worker") if before >= 0 else (0.0, "start", None)
        else:
            yield float(self.times.compute_end[index - 1]), "compute", ("compute", index - 1)
            if place - 1 - drains >= 0:
                yield self._reduced(index - 1 - drains, "buffer")

    def _reduced(self, index: int, cause: str) -> Candidate:
        return float(self.times.reduce_end[index]), cause, ("reduce", index)


def _last_tasks_before(times: TaskTimes) -> Indices:
    """Per ticket: the task whose reduce ended last in the chain that its worker ran before; -1: there was none."""
    tickets, start, _ = times.chains
    found = np.full(len(times.worker), -1)
    order = tickets[np.lexsort((start, times.worker[tickets]))].tolist()
    for earlier, later in pairwise(order):
        if times.worker[earlier] == times.worker[later]:
            first, end = times.offsets[earlier : earlier + 2].tolist()
            found[later] = first + int(np.argmax(times.reduce_end[first:end]))
    return found


def path_of_ranks(run: RankTimeline) -> list[tuple[int, str]]:
    """Numbers of units from first to last, each with what its start waited for: states, turns, rank, keys or nothing (start)."""
    if not len(run.end):
        return []
    number: int | None = int(np.argmax(run.end))
    found = []
    while number is not None:
        cause, before = _cause_of_start(run, number)
        found.append((number, cause))
        number = before
    return found[::-1]


def _cause_of_start(run: RankTimeline, number: int) -> tuple[str, int | None]:
    """What ended last before a unit started. All that it may wait for has lower numbers, so a path ends."""
    unit, start = run.shared.units[number], float(run.start[number])
    earlier = _earlier_on_rank(run, number)
    candidates: list[tuple[float, str, int | None]] = [(0.0, "start", None)]
    candidates += [(float(run.end[other]), "rank", other) for other in earlier]
    candidates += [(float(run.end[other]), "turns", other) for other in run.shared.waits[number]]
    if unit.before is not None:
        candidates.append((float(run.arrival[number]), "states", unit.before))
    latest, cause, before = max((c for c in candidates if c[0] <= start + TOLERANCE_US), key=lambda candidate: candidate[0])
    if start <= latest + TOLERANCE_US:
        return cause, before
    beside = [other for other in earlier if run.end[other] > start]  # overlapped: its workers became free one by one
    return ("rank", beside[-1]) if beside else ("keys", None)


def _earlier_on_rank(run: RankTimeline, number: int) -> list[int]:
    """Units of the same rank before this one. The last ones are all that can have held its workers."""
    mine = [unit.number for unit in run.shared.by_rank[run.shared.units[number].rank]]
    place = bisect_left(mine, number)
    return mine[max(0, place - MOST_BESIDE) : place]
