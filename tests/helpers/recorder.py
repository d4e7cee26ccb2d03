"""An executor's kernel without arithmetic, which writes down what happens."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from dash_attn.call.planning import plan_for
from dash_attn.execution.interleaving import Interleaving
from dash_attn.execution.rules import ChainPlace, Contribution, Ending, SumPlace
from dash_attn.execution.run import run_plan
from dash_attn.scheduling import Plan, Problem, Task
from dash_attn.scheduling.order import Ints

POLICIES = [Interleaving(), Interleaving(1), Interleaving(2), Interleaving(3, threads=True), Interleaving(None, threads=True)]


class Recorder:
    """Values are turns; a chain ends with its part."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.started: list[ChainPlace] = []
        self.walks: dict[ChainPlace, list[tuple[int, int]]] = defaultdict(list)
        self.landings: dict[tuple[int, int, int], list[tuple[int, bool]]] = defaultdict(list)
        self.sums: dict[SumPlace, list[tuple[int, bool]]] = defaultdict(list)
        self.resident = self.most_resident = 0

    def chain(self, ticket: ChainPlace, steps: Ints, members: list[int]) -> Iterator[Contribution | Ending]:
        with self.lock:
            self.started.append(ticket)
            self.resident += 1
            self.most_resident = max(self.resident, self.most_resident)
        return self._walk(ticket, steps, members)

    def _walk(self, ticket: ChainPlace, steps: Ints, members: list[int]) -> Iterator[Contribution | Ending]:
        for member in members:
            for q_tile, turn, _ in steps.tolist():
                self.walks[ticket].append((q_tile, member))
                yield Contribution(member, q_tile, turn, turn)
        yield Ending(ticket.part)
        with self.lock:
            self.resident -= 1

    def land(self, task: Task, value: Any, first: bool) -> None:
        self.landings[task.sequence, task.head, task.q_tile].append((value, first))

    def land_sum(self, place: SumPlace, value: Any, first: bool) -> None:
        self.sums[place].append((value, first))

    @property
    def in_turn_order(self) -> bool:
        return all(landed == [(turn, turn == 0) for turn in range(len(landed))] for landed in self.landings.values())

    @property
    def sums_in_order(self) -> bool:
        """Whether parts were added in their order, the first one stored."""
        return all(landed == [(part, i == 0) for i, (part, _) in enumerate(sorted(landed))] for landed in self.sums.values())


def plan_of(mask: str = "causal", q_tiles: int = 8, kv_tiles: int = 4, schedule: str = "auto", workers: int = 16, **rest: int) -> Plan:
    return plan_for(Problem.from_tiles(mask, q_tiles, kv_tiles, **rest), schedule, workers)


def run(plan: Plan, chosen: Interleaving | None = None, ordered: bool = True) -> Recorder:
    recorder = Recorder()
    run_plan(plan, recorder, ordered, chosen)
    return recorder
