"""Runs a plan's chains as coroutines under the rules of the GPU kernel, in any interleaving the rules allow.

At most `plan.workers` chains are resident, they start in ticket order, and a reduce waits until every lower rank of
its dQ tile has landed. Which resident chain moves next is the interleaving: the oldest that can (the default), a
random one, or real threads. In ordered mode the bits are the same under all of them; unordered mode adds in order of
arrival and is the control.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import product
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from .order import Ints
from .plan import Plan
from .problem import Task

if TYPE_CHECKING:
    from .threads import TaskTimes

DqTile = tuple[int, int, int]  # sequence, query head, Q tile


class ExecutionError(RuntimeError):
    """A plan that breaks the rules: a rank that is wrong, taken twice or missing."""


class Deadlock(ExecutionError):
    """No resident chain can move and none can start."""


class Ticket(NamedTuple):
    """One chain."""

    sequence: int
    head: int
    kv_tile: int


class Partial(NamedTuple):
    """A dQ partial that a chain has computed, for query head `member` of its group."""

    member: int
    q_tile: int
    rank: int
    value: Any


class Kernel(Protocol):
    """What a backend supplies: the arithmetic. The executor decides when it runs."""

    def chain(self, ticket: Ticket, steps: Ints, members: list[int]) -> Iterator[Partial]:
        """Walk `steps` (rows q_tile, rank, partial flag), yield each dQ partial; it has landed when the walk resumes."""

    def land(self, task: Task, value: Any, first: bool) -> None:
        """Store (`first`) or add a dQ partial."""


@dataclass(frozen=True)
class Interleaving:
    """Which chain moves next: the oldest that can (seed None), or a random one. Threads sleep at random instead."""

    seed: int | None = None
    threads: bool = False
    workers: int | None = None  # None: as many as the backend plans for
    record: list[TaskTimes] | None = field(default=None, compare=False)  # threads note there when every task ran

    def __post_init__(self) -> None:
        if self.record is not None and not self.threads:
            raise ValueError("only threads record times: coroutines take turns on one")
        for name, value, least in (("seed", self.seed, None), ("workers", self.workers, 1)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer)) or (least and value < least)):
                raise ValueError(f"{name} must be None or a whole number{' >= 1' if least else ''}; got {value!r}")


_current: ContextVar[Interleaving | None] = ContextVar("interleaving", default=None)


@contextmanager
def interleaving(
    seed: int | None, threads: bool = False, workers: int | None = None, record: list[TaskTimes] | None = None
) -> Iterator[Interleaving]:
    """Run the CPU backward passes inside this block under one interleaving, on `workers` workers."""
    chosen = Interleaving(seed, threads, workers, record)
    token = _current.set(chosen)
    try:
        yield chosen
    finally:
        _current.reset(token)


def current_interleaving() -> Interleaving | None:
    return _current.get()


def execute(plan: Plan, kernel: Kernel, ordered: bool = True, chosen: Interleaving | None = None) -> None:
    """Run every chain of the plan to its end, or raise ExecutionError."""
    chosen = Interleaving() if chosen is None else chosen
    ledger = Ledger(plan, ordered)
    if chosen.threads:
        from .threads import run_threads

        run_threads(plan, kernel, ledger, chosen.seed, chosen.record)
    else:
        _run_coroutines(plan, kernel, ledger, None if chosen.seed is None else Random(chosen.seed))
    ledger.finish()


def tickets_of(plan: Plan) -> list[Ticket]:
    """The chains of a plan in the order they start."""
    return [Ticket(*ticket) for ticket in plan.placement.tickets(plan.problem).tolist()]


class Chain:
    """A resident chain: a coroutine and the partial it wants to land, if it has computed one."""

    def __init__(self, plan: Plan, kernel: Kernel, ticket: Ticket) -> None:
        self.ticket = ticket
        self.kind = (ticket.head + plan.problem.head_offset) % plan.kinds
        self.pending: Partial | None = None
        self.task = plan.problem.task(*ticket, q_tile=0)  # the last task computed
        self._group = plan.problem.group
        self._coroutine = kernel.chain(ticket, plan.steps(self.kind, ticket.kv_tile), plan.members(self.kind))

    def compute(self) -> bool:
        """Run to the next partial. False when the walk has ended."""
        self.pending = next(self._coroutine, None)
        if self.pending is None:
            return False
        head = self.ticket.head * self._group + self.pending.member
        self.task = Task(head, self.pending.q_tile, self.ticket.kv_tile, self.ticket.sequence)
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
        """Raise if the rank of the pending partial is none of its dQ tile's."""
        task, rank, problem = chain.task, chain.rank, self.plan.problem
        if not 0 <= task.q_tile < problem.q_tiles:
            raise ExecutionError(f"{task} is outside the {problem.q_tiles} Q tiles of the problem")
        ranks = int(self.plan.ranks_per_q_tile[task.q_tile])
        if not 0 <= rank < ranks:
            raise ExecutionError(f"{task} has rank {rank}; its dQ tile has {ranks} ranks, counted from 0")

    def may_land(self, chain: Chain) -> bool:
        """Whether it is the turn of the pending partial. Raises if its turn has passed."""
        landed = self._landed[chain.dq_tile]
        if landed <= chain.rank or not self.ordered:
            return landed == chain.rank or not self.ordered
        raise ExecutionError(f"{chain.task} has rank {chain.rank}, but that rank of its dQ tile has already landed")

    def land(self, chain: Chain, kernel: Kernel) -> tuple[DqTile, int]:
        """Store or add the pending partial; returns its dQ tile and the rank that may land there next."""
        assert chain.pending is not None
        tile = chain.dq_tile
        kernel.land(chain.task, chain.pending.value, first=self._landed[tile] == 0)
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


def _run_coroutines(plan: Plan, kernel: Kernel, ledger: Ledger, rng: Random | None) -> None:
    """One thread plays all workers. Without `rng` the oldest chain that can move does, and a start comes last."""
    waiting = iter(tickets_of(plan))
    upcoming = next(waiting, None)
    resident: list[Chain] = []
    while resident or upcoming is not None:
        startable = upcoming is not None and len(resident) < plan.workers
        chain = _choose(resident, startable, ledger, rng)
        if chain is None and (not startable or upcoming is None):
            raise deadlock(plan, ledger, resident)
        if chain is None:
            assert upcoming is not None
            resident.append(Chain(plan, kernel, upcoming))
            upcoming = next(waiting, None)
        elif chain.pending is not None:
            ledger.land(chain, kernel)
        elif chain.compute():
            ledger.check(chain)
        else:
            resident.remove(chain)


def _choose(resident: list[Chain], startable: bool, ledger: Ledger, rng: Random | None) -> Chain | None:
    """The chain that moves next; None: start another, or nothing can move."""
    movable = (chain for chain in resident if chain.pending is None or ledger.may_land(chain))
    if rng is None:
        return next(movable, None)
    choices: list[Chain | None] = [*movable]
    if startable:
        choices.append(None)
    return rng.choice(choices) if choices else None
