"""Runs a schedule in model time: chains start in ticket order, reduces wait for their turn. Integer ticks, so exact.

The untimed run (all costs 0) is the validator's deadlock proof; the timed one is the simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .order import HeadOrder, Sum
from .problem import Task

if TYPE_CHECKING:
    from .schedule import Schedule

Progress = Callable[[int, int], None]

UNKNOWN = -1  # start of a reduce that still waits


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

    def __post_init__(self) -> None:
        self.reduce_start = [UNKNOWN] * self.reduces

    @property
    def reduces(self) -> int:
        return len(self.keys) + self.adds

    @property
    def ended(self) -> bool:
        return self.landed == self.reduces


def run_in_model_time(schedule: Schedule, costs: Costs, ordered: bool = True, progress: Progress | None = None) -> Execution:
    """Run all chains to completion or raise Stuck. With `ordered=False` reduces wait for nobody."""
    problem = schedule.problem
    tables = _Tables(schedule)
    landed = [0] * tables.keys  # reduces done per dQ tile, and per piece of a sum of dK and dV
    available = landed.copy()  # when the next turn may start there
    waiting: dict[tuple[int, int], Chain] = {}  # (key, turn) -> the chain that will reduce there
    free = [(0, worker) for worker in range(min(schedule.workers, problem.chains))]  # workers whose next free time is known
    chains: list[Chain] = []
    ends: dict[int, int] = {}
    tickets = schedule.tickets.tolist()
    for number, ticket in enumerate(tickets):
        if not free:
            raise Stuck(_blocked(schedule, chains, waiting))
        now, worker = heappop(free)
        chain = tables.chain(worker, now, *ticket)
        chains.append(chain)
        # A chain whose end is unknown waits, directly or not, for one not yet started: known ends are safe to pop.
        ready = [chain]
        while ready:
            runner = ready.pop()
            advance(runner, costs, ordered, landed, available, waiting, ready)
            if runner.ended and id(runner) not in ends:
                ends[id(runner)] = chain_end(runner, costs)
                heappush(free, (ends[id(runner)], runner.worker))
        if progress is not None and number % 256 == 0:
            progress(number, len(tickets))
    if waiting:
        raise Stuck(_blocked(schedule, chains, waiting))
    if progress is not None:
        progress(len(tickets), len(tickets))
    return Execution(
        offsets=np.cumsum([0] + [len(c.keys) for c in chains]),
        worker=np.array([c.worker for c in chains]),
        chain_start=np.array([c.start for c in chains]),
        chain_end=np.array([ends[id(c)] for c in chains]),
        compute_start=np.array([t for c in chains for t in c.compute_start[: len(c.keys)]], dtype=np.int64),
        reduce_start=np.array([t for c in chains for t in c.reduce_start[: len(c.keys)]], dtype=np.int64),
        add_start=np.array([c.reduce_start[len(c.keys) :] for c in chains], dtype=np.int64).reshape(len(chains), -1),
    )


def advance(
    chain: Chain,
    costs: Costs,
    ordered: bool,
    landed: list[int],
    available: list[int],
    waiting: dict[tuple[int, int], Chain],
    ready: list[Chain],
) -> None:
    """Run a chain as far as its turns allow. Chains it releases are appended to `ready`.

    A reduce that waits for its turn holds one drain; with more than one, later reduces of the chain may pass it.
    """
    compute, reduce, latency, overlap, startup = costs
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


def chain_end(chain: Chain, costs: Costs) -> int:
    last = chain.reduce_start[-max(1, costs.overlap) :]
    return max(last) + costs.reduce if last else chain.start


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
        keys, turns = self._of(self.schedule.order.kind_of(problem, part), len(members))[kv_tile]
        base = (sequence * problem.heads * problem.group + members.start) * problem.q_tiles
        if not self.sums:
            return Chain(worker, start, base, keys, turns)
        number, turn = Sum.of_part(problem, part, self.kinds)
        tile = ((sequence * problem.heads + part // problem.parts) * self.sums + number) * problem.kv_tiles + kv_tile
        return Chain(worker, start, base, keys, turns, problem.adds, self.dq_tiles + tile * problem.adds, turn)

    def _of(self, kind: int, count: int) -> list[tuple[list[int], list[int]]]:
        if (kind, count) not in self._expanded:
            self._expanded[kind, count] = _expand(self.schedule.order.kinds[kind], count, self.problem.q_tiles)
        return self._expanded[kind, count]


def _expand(kind: HeadOrder, count: int, q_tiles: int) -> list[tuple[list[int], list[int]]]:
    """Per chain of `count` query heads: dQ tile and turn of each task."""
    tasks = (kind.tasks(kv_tile, count) for kv_tile in range(kind.kv_tiles))
    return [((member * q_tiles + q_tile).tolist(), turn.tolist()) for q_tile, turn, member in tasks]


def _blocked(schedule: Schedule, chains: list[Chain], waiting: dict[tuple[int, int], Chain]) -> list[tuple[int, Task, int, str]]:
    """What every parked chain waits for."""
    tickets = schedule.tickets.tolist()
    number_of = {id(chain): number for number, chain in enumerate(chains)}
    started = {tuple(ticket) for ticket in tickets[: len(chains)]}
    report = []
    for (key, turn), chain in waiting.items():
        sequence, part, kv_tile = tickets[number_of[id(chain)]]
        if chain.adds and key >= chain.first_sum:
            task = schedule.problem.task(sequence, part, kv_tile, 0)
            report.append((chain.worker, task, turn, "the part before, to add dK and dV behind it"))
        else:
            report.append(_blocked_task(schedule, chain, key, turn, (sequence, part, kv_tile), started))
    return report


def _blocked_task(
    schedule: Schedule, chain: Chain, key: int, turn: int, place: tuple[int, int, int], started: set[tuple[int, ...]]
) -> tuple[int, Task, int, str]:
    problem, (sequence, part, kv_tile) = schedule.problem, place
    member, q_tile = divmod(key - chain.base, problem.q_tiles)
    order = schedule.order_of(part)
    before = np.flatnonzero((order.q_tile == q_tile) & (order.turn == turn - 1))
    if len(before):
        owner = int(order.chain[before[0]])
        awaited = str(problem.task(sequence, part, owner, q_tile, member))
        awaited += "" if (sequence, part, owner) in started else ", whose chain has not started"
    else:
        awaited = f"turn {turn - 1} of its Q tile, which no task has"
    return chain.worker, problem.task(sequence, part, kv_tile, q_tile, member), turn, awaited
