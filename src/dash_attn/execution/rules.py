"""The rules of the kernel's semaphores: a chain walks its tiles, and a contribution to a dQ tile lands when its rank has its turn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple, Protocol

from ..scheduling.order import Ints
from ..scheduling.plan import Plan
from ..scheduling.problem import Task

DqTile = tuple[int, int, int]  # sequence, query head, Q tile


class ExecutionError(RuntimeError):
    """A plan that breaks the rules: a rank that is wrong, taken twice or missing."""


class Deadlock(ExecutionError):
    """No resident chain can move and none can start."""


class ChainPlace(NamedTuple):
    """One chain."""

    sequence: int
    head: int
    kv_tile: int


class Contribution(NamedTuple):
    """A contribution to dQ that a chain has computed, for query head `member` of its group."""

    member: int
    q_tile: int
    rank: int
    value: Any


class TileArithmetic(Protocol):
    """What a backend supplies: the arithmetic. The executor decides when it runs."""

    def chain(self, place: ChainPlace, steps: Ints, members: list[int]) -> Iterator[Contribution]:
        """Walk `steps` (rows q_tile, rank, partial flag), yield each contribution to dQ; it has landed when the walk resumes."""

    def land(self, task: Task, value: Any, first: bool) -> None:
        """Store (`first`) or add a contribution to dQ."""


def chains_in_order(plan: Plan) -> list[ChainPlace]:
    """The chains of a plan in the order they start."""
    return [ChainPlace(*place) for place in plan.placement.tickets(plan.problem).tolist()]


class Chain:
    """A resident chain: a coroutine and the contribution it wants to land, if it has computed one."""

    def __init__(self, plan: Plan, arithmetic: TileArithmetic, place: ChainPlace) -> None:
        self.place = place
        self.kind = (place.head + plan.problem.head_offset) % plan.kinds
        self.pending: Contribution | None = None
        self.task = plan.problem.task(*place, q_tile=0)  # the last task computed
        self._group = plan.problem.group
        self._coroutine = arithmetic.chain(place, plan.steps(self.kind, place.kv_tile), plan.members(self.kind))

    def compute(self) -> bool:
        """Run to the next contribution. False when the walk has ended."""
        self.pending = next(self._coroutine, None)
        if self.pending is None:
            return False
        head = self.place.head * self._group + self.pending.member
        self.task = Task(head, self.pending.q_tile, self.place.kv_tile, self.place.sequence)
        return True

    @property
    def rank(self) -> int:
        assert self.pending is not None
        return self.pending.rank

    @property
    def dq_tile(self) -> DqTile:
        return self.task.sequence, self.task.head, self.task.q_tile


class Ledger:
    """How many ranks of each dQ tile have landed: the semaphores of the GPU kernel."""

    def __init__(self, plan: Plan, ordered: bool) -> None:
        self.plan, self.ordered = plan, ordered
        self._landed: dict[DqTile, int] = defaultdict(int)

    def check(self, chain: Chain) -> None:
        """Raise if the rank of the pending contribution is none of its dQ tile's."""
        task, rank, problem = chain.task, chain.rank, self.plan.problem
        if not 0 <= task.q_tile < problem.q_tiles:
            raise ExecutionError(f"{task} is outside the {problem.q_tiles} Q tiles of the problem")
        ranks = int(self.plan.ranks_per_q_tile[task.q_tile])
        if not 0 <= rank < ranks:
            raise ExecutionError(f"{task} has rank {rank}; its dQ tile has {ranks} ranks, counted from 0")

    def may_land(self, chain: Chain) -> bool:
        """Whether it is the turn of the pending contribution. Raises if its turn has passed."""
        landed = self._landed[chain.dq_tile]
        if landed <= chain.rank or not self.ordered:
            return landed == chain.rank or not self.ordered
        raise ExecutionError(f"{chain.task} has rank {chain.rank}, but that rank of its dQ tile has already landed")

    def land(self, chain: Chain, arithmetic: TileArithmetic) -> tuple[DqTile, int]:
        """Store or add the pending contribution; returns its dQ tile and the rank that may land there next."""
        assert chain.pending is not None
        tile = chain.dq_tile
        arithmetic.land(chain.task, chain.pending.value, first=self._landed[tile] == 0)
        chain.pending = None
        self._landed[tile] += 1
        return tile, self._landed[tile]

    def explain(self, chain: Chain) -> str:
        """What a blocked chain waits for."""
        awaited = self._landed[chain.dq_tile]
        owner = self._owner(chain, awaited)
        return f"{chain.task} (rank {chain.rank}) waits for rank {awaited}, which {owner or 'no task'} has"

    def _owner(self, chain: Chain, rank: int) -> Task | None:
        """The task of the same dQ tile that has this rank."""
        for kv_tile in range(self.plan.problem.kv_tiles):
            steps = self.plan.steps(chain.kind, kv_tile)
            if ((steps[:, 0] == chain.task.q_tile) & (steps[:, 1] == rank)).any():
                return chain.task._replace(kv_tile=kv_tile)
        return None

    def finish(self) -> None:
        """Raise unless every rank of every dQ tile has landed."""
        problem = self.plan.problem
        ranks = self.plan.ranks_per_q_tile.tolist()
        for tile in product(range(problem.batch), range(problem.heads * problem.group), range(problem.q_tiles)):
            sequence, head, q_tile = tile
            landed = self._landed.get(tile, 0)
            if landed != ranks[q_tile]:
                raise ExecutionError(f"dQ tile b{sequence}.h{head}.q{q_tile} has {ranks[q_tile]} ranks, but {landed} landed")


def deadlock(plan: Plan, ledger: Ledger, blocked: list[Chain]) -> Deadlock:
    """The error that names who waits for what."""
    lines = [f"{plan.schedule_name} is stuck on {plan.workers} workers: {len(blocked)} resident chains wait and none can start"]
    return Deadlock("\n  ".join(lines + [ledger.explain(chain) for chain in blocked[:4]]))
