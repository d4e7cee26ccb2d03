"""In which sequence all ranks together start their units."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from .drafts import Draft
from .trips import followers_of

HOP = 20  # what a hop is thought to take: one part in so many of the largest unit


def in_sequence(drafts: list[Draft], ranks: int) -> list[int]:
    """The drafts in the order in which they start. Each comes after those that it waits for."""
    sequence = _Sequencer(drafts, ranks).run()
    assert len(sequence) == len(drafts), "trips have no circle, and sums are added part after part"
    return sequence


class _Sequencer:
    """A list schedule in which a task takes one unit of time: a free rank starts the ready unit of least priority.

    Ranks keep to the sequence. So a hop must take some time here: else a rank would be told to wait for states that have just left
    another one, with other work at hand. How long hardly matters (docs/simulator.md).
    """

    def __init__(self, drafts: list[Draft], ranks: int) -> None:
        self.drafts, self.ranks = drafts, ranks
        self.hop = max((draft.cost for draft in drafts), default=0) // HOP
        self.waiting = [len(draft.waits) for draft in drafts]
        edges = [(earlier, later) for later, draft in enumerate(drafts) for earlier in draft.waits]
        self.followers = followers_of(len(drafts), np.array(edges, dtype=np.int64).reshape(-1, 2))
        self.ready: list[list[tuple[tuple[int, ...], int]]] = [[] for _ in range(ranks)]
        self.events: list[tuple[int, bool, int]] = []  # when, whether something has arrived at this draft (else: it has ended), which

    def run(self) -> list[int]:
        """The drafts in the order in which they start."""
        for index, waiting in enumerate(self.waiting):
            if not waiting:
                self._make_ready(index)
        idle, sequence, now = set(range(self.ranks)), list[int](), 0
        while True:
            for rank in sorted(idle):
                if self.ready[rank]:
                    index = heappop(self.ready[rank])[1]
                    sequence.append(index)
                    heappush(self.events, (now + self.drafts[index].cost, False, index))
                    idle.remove(rank)
            if not self.events:
                return sequence
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                _, arrived, index = heappop(self.events)
                if arrived:
                    self._arrive(index)
                else:
                    idle.add(self.drafts[index].unit.rank)
                    self._end(index, now)

    def _end(self, index: int, now: int) -> None:
        for follower in self.followers[index]:
            hops = self.drafts[follower].unit.rank != self.drafts[index].unit.rank
            if hops and self.hop:
                heappush(self.events, (now + self.hop, True, follower))
            else:
                self._arrive(follower)

    def _arrive(self, index: int) -> None:
        self.waiting[index] -= 1
        if not self.waiting[index]:
            self._make_ready(index)

    def _make_ready(self, index: int) -> None:
        draft = self.drafts[index]
        heappush(self.ready[draft.unit.rank], (draft.priority, index))
