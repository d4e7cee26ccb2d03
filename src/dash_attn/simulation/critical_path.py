"""Walks back from the last event of a simulated run to what it waited for, and so on to the start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .simulate import Timeline

Node = tuple[str, int]  # ("compute" or "reduce", task index)


def critical_path(timeline: Timeline) -> list[tuple[Node, str]]:
    """(node, cause) from first to last; the cause is what the node waited for: start, worker, compute, buffer, drain, rank."""
    if not len(timeline.execution.reduce_start):
        return []
    back = _Backtrack(timeline)
    node: Node | None = ("reduce", int(np.argmax(timeline.execution.reduce_start)))
    path = []
    while node is not None:
        cause, before = back.reduce(node[1]) if node[0] == "reduce" else back.compute(node[1])
        path.append((node, cause))
        node = before
    return path[::-1]


class _Backtrack:
    """What bound each event. All times are ticks, so equality decides."""

    def __init__(self, timeline: Timeline) -> None:
        self.run, self.costs = timeline.execution, timeline.machine.costs
        self.ticket_of = np.repeat(np.arange(len(self.run.worker)), np.diff(self.run.offsets))
        self.rank_before = _rank_predecessors(timeline)
        self.chain_before = _previous_on_worker(timeline)

    def reduce(self, index: int) -> tuple[str, Node]:
        begin = self.run.reduce_start[index]
        if begin == self.run.compute_start[index] + self.costs.compute:
            return "compute", ("compute", index)
        rival = int(self.rank_before[index])
        if rival >= 0 and self.run.reduce_start[rival] + max(self.costs.reduce, self.costs.latency) == begin:
            return "rank", ("reduce", rival)
        return "drain", ("reduce", index - max(1, self.costs.overlap))

    def compute(self, index: int) -> tuple[str, Node | None]:
        ticket = int(self.ticket_of[index])
        if index == self.run.offsets[ticket]:
            previous = int(self.chain_before[ticket])
            if previous < 0:
                return "start", None
            tail = np.arange(self.run.offsets[previous], self.run.offsets[previous + 1])
            return "worker", ("reduce", int(tail[np.argmax(self.run.reduce_start[tail])]))
        if self.costs.overlap and self.run.compute_start[index - 1] + self.costs.compute == self.run.compute_start[index]:
            return "compute", ("compute", index - 1)
        return "buffer", ("reduce", index - 1 - self.costs.overlap)


def _previous_on_worker(timeline: Timeline) -> NDArray[np.int64]:
    """The ticket each ticket's worker ran before (-1: none, or only chains without tasks)."""
    run = timeline.execution
    latest: dict[int, int] = {}
    before = np.full(len(run.worker), -1)
    for ticket, worker in enumerate(run.worker.tolist()):
        before[ticket] = latest.get(worker, -1)
        if run.offsets[ticket + 1] > run.offsets[ticket]:
            latest[worker] = ticket
    return before


def _rank_predecessors(timeline: Timeline) -> NDArray[np.int64]:
    """Index of the task with the next lower rank on the same dQ tile (-1 for rank 0)."""
    problem, run = timeline.schedule.problem, timeline.execution
    keys, ranks = [], []
    for sequence, part, kv_tile in timeline.schedule.tickets.tolist():
        q_tile, rank_of, member = timeline.schedule.tasks(part, kv_tile)
        query_head = sequence * problem.heads * problem.group + problem.members(part).start + member
        keys.append(query_head * problem.q_tiles + q_tile)
        ranks.append(rank_of)
    key, rank = np.concatenate(keys), np.concatenate(ranks)
    by_rank = np.lexsort((rank, key))
    before = np.full(len(run.reduce_start), -1)
    same = key[by_rank[1:]] == key[by_rank[:-1]]
    before[by_rank[1:][same]] = by_rank[:-1][same]
    return before
