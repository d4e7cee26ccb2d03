"""Runs a schedule in model time: chains start in ticket order, reduces wait for their turn. Integer ticks, so exact.

The untimed run (all costs 0) is the validator's deadlock proof; the timed one is the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .order import Sum
from .problem import Task

if TYPE_CHECKING:
    from .schedule import Schedule

Progress = Callable[[int, int], None]

UNKNOWN = -1  # start of a reduce that still waits, end of a chain that has one


class Costs(NamedTuple):
    """Machine constants in ticks; see DESIGN.md, cost model."""

    compute: int
    reduce: int
    latency: int
    overlap: int
    startup: int = 0


class Stuck(Exception):
    """No resident chain can proceed and none can start. `blocked`: (worker, task, its turn, what it waits for)."""

    def __init__(self, blocked: list[tuple[int, Task, int, str]]) -> None:
        super().__init__(f"{len(blocked)} chains are blocked, first {blocked[0][1]}" if blocked else "no chain can start")
        self.blocked = blocked


class Execution(NamedTuple):
    """Times in ticks. Chains in ticket order; tasks of ticket t are offsets[t]:offsets[t + 1], in walk order."""

    offsets: NDArray[np.int64]
    worker: NDArray[np.int64]
    chain_start: NDArray[np.int64]
    chain_end: NDArray[np.int64]
    compute_start: NDArray[np.int64]
    reduce_start: NDArray[np.int64]
    add_start: NDArray[np.int64]  # [chains, adds]: of dK and dV, behind the tasks


@dataclass(slots=True)
class Chain:
    """A started chain: `keys[i]` is the dQ tile of task i, relative to `base`; what comes before `landed` has all been reduced.

    Behind its tasks a chain of a part adds dK and dV to the sums of its KV tile: reduces without a compute, to keys from `first_sum`
    on, all of them at its turn.
    """

    worker: int
    start: int
    base: int
    keys: list[int]
    turns: list[int]
    adds: int = 0
    first_sum: int = 0
    turn: int = 0
    compute_start: list[int] = field(default_factory=list)
    reduce_start: list[int] = field(init=False)
    landed: int = 0
    end: int = UNKNOWN

    def __post_init__(self) -> None:
        self.reduce_start = [UNKNOWN] * self.reduces

    @property
    def reduces(self) -> int:
        return len(self.keys) + self.adds


def run_in_model_time(schedule: Schedule, costs: Costs, ordered: bool = True, progress: Progress | None = None) -> Execution:
    """Run all chains to completion or raise Stuck. With `ordered=False` reduces wait for nobody."""
    problem = schedule.problem
    tables = _Tables(schedule)
    reduces = Reduces(tables.keys, costs, ordered)
    free = [(0, worker) for worker in range(min(schedule.workers, problem.chains))]  # workers whose next free time is known
    chains: list[Chain] = []
    tickets = schedule.tickets.tolist()
    for number, ticket in enumerate(tickets):
        if not free:
            raise Stuck(_blocked(schedule, chains, reduces.waiting))
        now, worker = heappop(free)
        chains.append(tables.chain(worker, now, *ticket))
        # A chain whose end is unknown waits, directly or not, for one not yet started: known ends are safe to pop.
        for ended in reduces.run(chains[-1]):
            heappush(free, (ended.end, ended.worker))
        if progress is not None and number % 256 == 0:
            progress(number, len(tickets))
    if reduces.waiting:
        raise Stuck(_blocked(schedule, chains, reduces.waiting))
    if progress is not None:
        progress(len(tickets), len(tickets))
    return Execution(
        offsets=np.cumsum([0] + [len(c.keys) for c in chains]),
        worker=np.array([c.worker for c in chains]),
        chain_start=np.array([c.start for c in chains]),
        chain_end=np.array([c.end for c in chains]),
        compute_start=np.array([t for c in chains for t in c.compute_start[: len(c.keys)]], dtype=np.int64),
        reduce_start=np.array([t for c in chains for t in c.reduce_start[: len(c.keys)]], dtype=np.int64),
        add_start=np.array([c.reduce_start[len(c.keys) :] for c in chains], dtype=np.int64).reshape(len(chains), -1),
    )


class Reduces:
    """What has been reduced to each key, a dQ tile or a piece of a sum of dK and dV, and which chains wait for their turn there."""

    def __init__(self, keys: int, costs: Costs, ordered: bool = True) -> None:
        self.costs, self.ordered = costs, ordered
        self.landed = [0] * keys  # reduces done
        self.available = [0] * keys  # when the next turn may start
        self.waiting: dict[tuple[int, int], Chain] = {}  # (key, turn) -> the chain that will reduce there

    def run(self, chain: Chain) -> Iterator[Chain]:
        """Run a chain, and those that it releases, as far as their turns allow; yields those that end."""
        ready = [chain]
        while ready:
            runner = ready.pop()
            self._advance(runner, ready)
            if runner.landed == runner.reduces and runner.end == UNKNOWN:
                last = runner.reduce_start[-max(1, self.costs.overlap) :]
                runner.end = max(last) + self.costs.reduce if last else runner.start
                yield runner

    def _advance(self, chain: Chain, ready: list[Chain]) -> None:
        """Chains that it releases are appended to `ready`.

        A reduce that waits for its turn holds one drain; with more than one, later reduces of the chain may pass it.
        """
        compute, reduce, latency, overlap, startup = self.costs
        ordered, landed, available, waiting = self.ordered, self.landed, self.available, self.waiting
        drains = overlap if overlap > 1 else 1
        hand_over = reduce if reduce > latency else latency
        keys, turns, base = chain.keys, chain.turns, chain.base
        tasks, count = len(keys), chain.reduces
        starts, reduces = chain.compute_start, chain.reduce_start
        for index in range(chain.landed, count):
            if reduces[index] != UNKNOWN:
                continue
            if index >= drains and reduces[index - drains] == UNKNOWN:
                break
            if len(starts) == index:  # else its compute ended before the chain was parked here
                begin = chain.start + startup if not index else starts[-1] + compute if index <= tasks else starts[-1]
                buffer = index - 1 - overlap
                if buffer >= 0 and reduces[buffer] + reduce > begin:
                    begin = reduces[buffer] + reduce
                starts.append(begin)
            is_task = index < tasks
            key = base + keys[index] if is_task else chain.first_sum + index - tasks
            turn = turns[index] if is_task else chain.turn
            if ordered and landed[key] != turn:
                waiting[key, turn] = chain
                continue
            begin = starts[index] + compute if is_task else starts[index]
            if index >= drains and reduces[index - drains] + reduce > begin:
                begin = reduces[index - drains] + reduce
            if ordered:
                if available[key] > begin:
                    begin = available[key]
                available[key] = begin + hand_over
                landed[key] += 1
                if waiting and (released := waiting.pop((key, landed[key]), None)) is not None:
                    ready.append(released)
            reduces[index] = begin
        while chain.landed < count and reduces[chain.landed] != UNKNOWN:
            chain.landed += 1


class _Tables:
    """What every chain reduces to: shared by the parts of one kind and size."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.problem, self.kinds = schedule, schedule.problem, len(schedule.order.kinds)
        self.dq_tiles = self.problem.batch * self.problem.heads * self.problem.group * self.problem.q_tiles
        self.sums = Sum.how_many(self.problem, self.kinds) if self.problem.parts > 1 else 0
        self.keys = self.dq_tiles + self.problem.batch * self.problem.heads * self.sums * self.problem.kv_tiles * self.problem.adds
        self._expanded: dict[tuple[int, int], list[tuple[list[int], list[int]]]] = {}

    def chain(self, worker: int, start: int, sequence: int, part: int, kv_tile: int) -> Chain:
        problem, members = self.problem, self.problem.members(part)
        keys, turns = self._of(problem.kind_of(part, self.kinds), len(members))[kv_tile]
        base = (sequence * problem.heads * problem.group + members.start) * problem.q_tiles
        if not self.sums:
            return Chain(worker, start, base, keys, turns)
        number, turn = Sum.of_part(problem, part, self.kinds)
        tile = ((sequence * problem.heads + part // problem.parts) * self.sums + number) * problem.kv_tiles + kv_tile
        return Chain(worker, start, base, keys, turns, problem.adds, self.dq_tiles + tile * problem.adds, turn)

    def _of(self, kind: int, count: int) -> list[tuple[list[int], list[int]]]:
        """Per chain of `count` query heads: dQ tile and turn of each task."""
        if (kind, count) not in self._expanded:
            order = self.schedule.order.kinds[kind]
            tasks = (order.tasks(kv_tile, count) for kv_tile in range(order.kv_tiles))
            tiles = [((member * self.problem.q_tiles + q_tile).tolist(), turn.tolist()) for q_tile, turn, member in tasks]
            self._expanded[kind, count] = tiles
        return self._expanded[kind, count]


def _blocked(schedule: Schedule, chains: list[Chain], waiting: dict[tuple[int, int], Chain]) -> list[tuple[int, Task, int, str]]:
    """What every parked chain waits for."""
    problem, tickets = schedule.problem, schedule.tickets.tolist()
    number_of = {id(chain): number for number, chain in enumerate(chains)}
    started = tickets[: len(chains)]
    report = []
    for (key, turn), chain in waiting.items():
        sequence, part, kv_tile = tickets[number_of[id(chain)]]
        if chain.adds and key >= chain.first_sum:
            q_tile, member, awaited = 0, 0, "the part before, to add dK and dV behind it"
        else:
            member, q_tile = divmod(key - chain.base, problem.q_tiles)
            order = schedule.order_of(part)
            owners = order.chain[(order.q_tile == q_tile) & (order.turn == turn - 1)].tolist()  # one, or none has this turn
            awaited = f"turn {turn - 1} of its Q tile, which no task has"
            if owners:
                late = "" if [sequence, part, owners[0]] in started else ", whose chain has not started"
                awaited = f"{problem.task(sequence, part, owners[0], q_tile, member)}{late}"
        report.append((chain.worker, problem.task(sequence, part, kv_tile, q_tile, member), turn, awaited))
    return report
