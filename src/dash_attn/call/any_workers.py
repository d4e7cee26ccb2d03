"""Plans on any number of workers, for backends that can keep dK and dV of a chain in memory while it rests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Protocol

from torch import Tensor

from ..scheduling.order import WORKER_INVARIANT
from ..scheduling.plan import Plan, lower
from ..scheduling.problem import Problem
from ..scheduling.ranks.in_legs import in_legs
from ..scheduling.ranks.units import SharedSchedule, Unit
from ..scheduling.schedule import Schedule
from ..scheduling.validate import StuckOnWorkers
from .given_schedule import is_given, schedule_for
from .planning import plan_for


class WalksLegs(Protocol):
    """A backend's backward of one device, as far as legs need it."""

    def new_state(self, unit: Unit) -> Tensor: ...
    def run(self, unit: Unit, state: Tensor) -> None: ...


def walk_in_legs(backward: WalksLegs, legs: SharedSchedule) -> None:
    """All units of a device that is alone. Between two legs of a chain its state rests in memory."""
    resting: dict[int, Tensor] = {}  # states, by the unit that they come from
    for unit in legs.units:
        state = backward.new_state(unit) if unit.before is None else resting.pop(unit.before)
        backward.run(unit, state)
        if unit.after is not None:
            resting[unit.number] = state
        del state  # else one that has ended would be there beside the next one that begins


@dataclass(frozen=True, eq=False)
class AnyWorkers:
    """A plan, and what to run where its workers are too few for whole chains."""

    plan: Plan
    proven_on_more: Schedule | None = None  # None: they are enough

    @cached_property
    def legs(self) -> SharedSchedule | None:
        """None: whole chains can run."""
        return None if self.proven_on_more is None else in_legs(self.proven_on_more, self.plan.workers)


@lru_cache(maxsize=64)
def plan_on_any(problem: Problem, schedule: str, workers: int) -> AnyWorkers:
    """One order, whatever the number of workers. Raises ScheduleError where the schedule does not serve the problem."""
    try:
        return AnyWorkers(plan_for(problem, schedule, workers))
    except StuckOnWorkers:
        made = schedule_for(problem, schedule, _enough(problem))
        if not is_given(schedule) and WORKER_INVARIANT not in made.order.guarantees:
            raise  # on more workers it is another order
    plan = lower(made)
    return AnyWorkers(replace(plan, placement=replace(plan.placement, workers=workers)), made)


def _enough(problem: Problem) -> int:
    """Workers for all chains at once, into however many parts groups are dealt: then nobody waits to start."""
    return problem.batch * problem.heads * problem.group * problem.kv_tiles
