"""Walks back from the last event of a simulated run to what it waited for, and so on to the start."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..scheduling.order import Sum, neighbours
from ..scheduling.schedule import Schedule

if TYPE_CHECKING:
    from .simulate import Timeline

Node = tuple[str, int]  # ("compute" or "reduce", task index) or ("add", adds before it, in the order of tickets)


def critical_path(timeline: Timeline) -> list[tuple[Node, str]]:
    """(node, cause) from first to last; the cause is what the node waited for: start, worker, compute, buffer, drain, turn."""
    if not len(timeline.execution.reduce_start):
        return []
    back = _Backtrack(timeline)
    node: Node | None = back.last
    path = []
    while node is not None:
        cause, before = back.cause_of(node)
        path.append((node, cause))
        node = before
    return path[::-1]


class _Backtrack:
    """What bound each event. All times are ticks, so equality decides."""

    def __init__(self, timeline: Timeline) -> None:
        self.run, self.costs = timeline.execution, timeline.machine.costs
        self.adds = self.run.add_start.shape[1]
        self.add_start = self.run.add_start.ravel()
        self.ticket_of = np.repeat(np.arange(len(self.run.worker)), np.diff(self.run.offsets))
        self.turn_before = turn_predecessors(timeline.schedule)
        problem, kinds = timeline.schedule.problem, len(timeline.schedule.order.kinds)
        tickets = timeline.schedule.tickets.tolist()
        sums = [(s, part // problem.parts, Sum.of_part(problem, part, kinds).number, kv_tile) for s, part, kv_tile in tickets]
        self.sum_before = _previous(sums)  # turns are in the order of tickets
        takes_time = (np.diff(self.run.offsets) > 0) | bool(self.run.add_start.size)
        self.chain_before = _previous(self.run.worker.tolist(), takes_time)
        self.hand_over = max(self.costs.reduce, self.costs.latency)

    @property
    def last(self) -> Node:
        """The reduce or add that ends the run."""
        return self._last_of(int(np.argmax(self.run.chain_end)))

    def cause_of(self, node: Node) -> tuple[str, Node | None]:
        phase, index = node
        return self.reduce(index) if phase == "reduce" else self.compute(index) if phase == "compute" else self.add(index)

    def reduce(self, index: int) -> tuple[str, Node]:
        begin = self.run.reduce_start[index]
        if begin == self.run.compute_start[index] + self.costs.compute:
            return "compute", ("compute", index)
        rival = int(self.turn_before[index])
        if rival >= 0 and self.run.reduce_start[rival] + self.hand_over == begin:
            return "turn", ("reduce", rival)
        return "drain", ("reduce", index - max(1, self.costs.overlap))

    def compute(self, index: int) -> tuple[str, Node | None]:
        ticket = int(self.ticket_of[index])
        if index == self.run.offsets[ticket]:
            return self._start_of(ticket)
        if self.costs.overlap and self.run.compute_start[index - 1] + self.costs.compute == self.run.compute_start[index]:
            return "compute", ("compute", index - 1)
        return "buffer", ("reduce", index - 1 - self.costs.overlap)

    def add(self, index: int) -> tuple[str, Node | None]:
        begin = self.add_start[index]
        ticket, piece = divmod(index, self.adds)
        first, end = self.run.offsets[ticket : ticket + 2].tolist()
        if end == first and begin == self.run.chain_start[ticket] + self.costs.startup:
            return self._start_of(ticket)
        if end > first and begin == self.run.compute_start[end - 1] + self.costs.compute:
            return "compute", ("compute", end - 1)
        rival = int(self.sum_before[ticket])
        if rival >= 0 and self.add_start[rival * self.adds + piece] + self.hand_over == begin:
            return "turn", ("add", rival * self.adds + piece)
        reduces, place = self._reduces_of(ticket), end - first + piece
        drained = place - max(1, self.costs.overlap)
        if drained >= 0 and self._begin(reduces[drained]) + self.costs.reduce == begin:
            return "drain", reduces[drained]
        # An add takes no compute: it has room as soon as those before it in the chain had, so their buffers count as well.
        buffers = reversed(range(max(0, end - first - 1 - self.costs.overlap), place - self.costs.overlap))
        return "buffer", next(reduces[i] for i in buffers if self._begin(reduces[i]) + self.costs.reduce == begin)

    def _start_of(self, ticket: int) -> tuple[str, Node | None]:
        previous = int(self.chain_before[ticket])
        return ("start", None) if previous < 0 else ("worker", self._last_of(previous))

    def _last_of(self, ticket: int) -> Node:
        return max(self._reduces_of(ticket), key=self._begin)

    def _reduces_of(self, ticket: int) -> list[Node]:
        tasks = range(*self.run.offsets[ticket : ticket + 2].tolist())
        adds = range(ticket * self.adds, (ticket + 1) * self.adds)
        return [("reduce", index) for index in tasks] + [("add", index) for index in adds]

    def _begin(self, node: Node) -> int:
        return int((self.run.reduce_start if node[0] == "reduce" else self.add_start)[node[1]])


def _previous(places: Sequence[Hashable], counted: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
    """For each ticket, the one before that has the same place, among those that are counted (-1: none)."""
    latest: dict[Hashable, int] = {}
    before = np.full(len(places), -1)
    for ticket, place in enumerate(places):
        before[ticket] = latest.get(place, -1)
        if counted is None or counted[ticket]:
            latest[place] = ticket
    return before


def turn_predecessors(schedule: Schedule) -> NDArray[np.int64]:
    """Index of the task with the next lower turn on the same dQ tile (-1 for turn 0)."""
    problem = schedule.problem
    keys, turns = [], []
    for sequence, part, kv_tile in schedule.tickets.tolist():
        q_tile, turn_of, member = schedule.tasks(part, kv_tile)
        query_head = sequence * problem.heads * problem.group + problem.members(part).start + member
        keys.append(query_head * problem.q_tiles + q_tile)
        turns.append(turn_of)
    earlier, later = neighbours(np.concatenate(keys), np.concatenate(turns))
    before = np.full(schedule.problem.tasks, -1)
    before[later] = earlier
    return before
