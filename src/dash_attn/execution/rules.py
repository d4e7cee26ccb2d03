"""The rules of the kernel's semaphores: a chain walks its tiles, and a contribution to a dQ tile lands when its turn has come."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple, Protocol

from ..errors import ExecutionError
from ..scheduling.order import Ints
from ..scheduling.plan import Plan
from ..scheduling.problem import Task

Target = tuple[Any, ...]  # a dQ tile (sequence, query head, Q tile), or "sum" and a SumPlace


class Deadlock(ExecutionError):
    """No resident chain can move and none can start."""


class ChainPlace(NamedTuple):
    """One chain."""

    sequence: int
    part: int
    kv_tile: int


class SumPlace(NamedTuple):
    """A sum of dK and dV: of one KV tile of one KV head, over parts of one kind."""

    number: int
    sequence: int
    kv_head: int
    kv_tile: int


class Contribution(NamedTuple):
    """A contribution to dQ that a chain has computed, for the `member`-th query head of its part."""

    member: int
    q_tile: int
    turn: int
    value: Any


class Ending(NamedTuple):
    """dK and dV of a chain that has walked to its end."""

    value: Any


Coroutine = Iterator[Contribution | Ending]


class TileArithmetic(Protocol):
    """What a backend supplies: the arithmetic. The executor decides when it runs."""

    def chain(self, place: ChainPlace, steps: Ints, members: list[int]) -> Coroutine:
        """Walk `steps` (rows q_tile, turn, partial flag), yield each contribution to dQ; it has landed when the walk resumes.
        At last yield dK and dV."""

    def land(self, task: Task, value: Any, first: bool) -> None:
        """Store (`first`) or add a contribution to dQ."""

    def land_sum(self, place: SumPlace, value: Any, first: bool) -> None:
        """Store (`first`) or add what a chain ended with."""


def chains_in_order(plan: Plan) -> list[ChainPlace]:
    """The chains of a plan in the order they start."""
    return [ChainPlace(*place) for place in plan.placement.tickets(plan.problem).tolist()]


class Chain:
    """A resident chain: a coroutine and what it wants to land, if it has computed anything."""

    def __init__(self, plan: Plan, place: ChainPlace, coroutine: Coroutine) -> None:
        self.place, self.problem = place, plan.problem
        self.kind = plan.kind_of(place.part)
        self.sum = plan.sum_of(place.part)
        self.pending: Contribution | Ending | None = None
        self.target: Target = ()  # what the pending value is added to
        self.turn = 0  # and when
        self.task = plan.problem.task(*place, q_tile=0)  # the last task computed
        self._coroutine = coroutine

    def compute(self) -> bool:
        """Run to the next contribution, or to the sums at the end. False when those have landed."""
        self.pending = next(self._coroutine, None)
        if isinstance(self.pending, Contribution):
            self.task = self.problem.task(*self.place, self.pending.q_tile, self.pending.member)
            self.target, self.turn = (self.task.sequence, self.task.head, self.task.q_tile), self.pending.turn
        else:
            self.target, self.turn = ("sum", *self.sum_place), self.sum.turn
        return self.pending is not None

    @property
    def is_ending(self) -> bool:
        return isinstance(self.pending, Ending)

    @property
    def sum_place(self) -> SumPlace:
        return SumPlace(self.sum.number, self.place.sequence, self.place.part // self.problem.parts, self.place.kv_tile)

    def __str__(self) -> str:
        return f"dK and dV of b{self.place.sequence}.part{self.place.part}.kv{self.place.kv_tile}" if self.is_ending else str(self.task)


Starts = Iterator[Callable[[], Chain]]  # each starts a chain


def whole_chains(plan: Plan, arithmetic: TileArithmetic) -> Starts:
    """All chains of a plan, from beginning to end, in the order they start."""

    def start(place: ChainPlace) -> Chain:
        steps = plan.steps(plan.kind_of(place.part), place.kv_tile)
        return Chain(plan, place, arithmetic.chain(place, steps, plan.members(place.part)))

    return (partial(start, place) for place in chains_in_order(plan))


class Landed:
    """How many turns of each dQ tile, and how many parts of each sum of dK and dV, have landed: the semaphores of the GPU kernel."""

    def __init__(self, plan: Plan, arithmetic: TileArithmetic, ordered: bool) -> None:
        self.plan, self.arithmetic, self.ordered = plan, arithmetic, ordered
        self._landed: dict[Target, int] = defaultdict(int)

    def check(self, chain: Chain) -> None:
        """Raise if the turn of the pending contribution is none of its dQ tile's."""
        if chain.is_ending:
            return
        task, turn, problem = chain.task, chain.turn, self.plan.problem
        if not 0 <= task.q_tile < problem.q_tiles:
            raise ExecutionError(f"{task} is outside the {problem.q_tiles} Q tiles of the problem")
        turns = int(self.plan.turns_per_q_tile[task.q_tile])
        if not 0 <= turn < turns:
            raise ExecutionError(f"{task} has turn {turn}; its dQ tile has {turns} turns, counted from 0")

    def may_land(self, chain: Chain) -> bool:
        """Whether it is the turn of what is pending. Raises if its turn has passed."""
        landed = self._landed[chain.target]
        if landed <= chain.turn or not self.ordered:
            return landed == chain.turn or not self.ordered
        where = "its sum" if chain.is_ending else "its dQ tile"
        raise ExecutionError(f"{chain} has turn {chain.turn}, but that turn of {where} has already landed")

    def land(self, chain: Chain) -> tuple[Target, int]:
        """Store or add what is pending; returns where, and the turn that may land there next."""
        assert chain.pending is not None
        target = chain.target
        first = self._landed[target] == 0
        if chain.is_ending:
            self.arithmetic.land_sum(chain.sum_place, chain.pending.value, first)
        else:
            self.arithmetic.land(chain.task, chain.pending.value, first)
        chain.pending = None
        self._landed[target] += 1
        return target, self._landed[target]

    def deadlock(self, blocked: list[Chain]) -> Deadlock:
        """The error that names who waits for what."""
        name, workers = self.plan.schedule_name, self.plan.workers
        lines = [f"{name} is stuck on {workers} workers: {len(blocked)} resident chains wait and none can start"]
        return Deadlock("\n  ".join(lines + [self._awaited_by(chain) for chain in blocked[:4]]))

    def _awaited_by(self, chain: Chain) -> str:
        awaited = self._landed[chain.target]
        owner = "an earlier part of its group" if chain.is_ending else self._owner(chain, awaited) or "no task"
        return f"{chain} (turn {chain.turn}) waits for turn {awaited}, which {owner} has"

    def _owner(self, chain: Chain, turn: int) -> Task | None:
        """The task of the same dQ tile that has this turn."""
        for kv_tile in range(self.plan.problem.kv_tiles):
            steps = self.plan.steps(chain.kind, kv_tile)
            if ((steps[:, 0] == chain.task.q_tile) & (steps[:, 1] == turn)).any():
                return chain.task._replace(kv_tile=kv_tile)
        return None

    def finish(self, q_tiles: Sequence[int] | None = None, chains: int | None = None) -> None:
        """Raise unless every turn of every dQ tile has landed, and every part of every sum: of all, or of these Q tiles and of as many
        chains."""
        problem = self.plan.problem
        q_tiles = range(problem.q_tiles) if q_tiles is None else q_tiles
        chains = problem.chains if chains is None else chains
        turns = self.plan.turns_per_q_tile.tolist()
        for tile in product(range(problem.batch), range(problem.heads * problem.group), q_tiles):
            sequence, head, q_tile = tile
            landed = self._landed.get(tile, 0)
            if landed != turns[q_tile]:
                raise ExecutionError(f"dQ tile b{sequence}.h{head}.q{q_tile} has {turns[q_tile]} turns, but {landed} landed")
        ended = sum(landed for target, landed in self._landed.items() if target[0] == "sum")
        if ended != chains:
            raise ExecutionError(f"the plan has {chains} chains, but {ended} landed their dK and dV")
