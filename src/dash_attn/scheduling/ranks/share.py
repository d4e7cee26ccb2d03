"""Deals a schedule to ranks: its legs become units, and those one sequence."""

from __future__ import annotations

from ..order import WORKER_INVARIANT
from ..problem import whole_number
from ..schedule import Schedule
from ..validate import ANY_WORKERS, ScheduleError
from .drafts import drafts_of
from .sequence import in_sequence
from .sharding import Sharding
from .trips import Trips, trips_without_circle
from .units import SharedSchedule, Unit


def share(schedule: Schedule, sharding: Sharding, heads_together: int = 1) -> SharedSchedule:
    """Deal a schedule to the ranks of a sharding. Raises ScheduleError where ranks could wait for each other in a circle.

    heads_together: heads of one kind that a unit has side by side, at most. It decides time and memory alone.
    """
    sharding.check(schedule.problem)
    whole_number("heads_together", heads_together)
    if WORKER_INVARIANT not in schedule.order.guarantees:
        raise ScheduleError(
            f"ranks that share a sequence need an order that is a function of the sequence alone; that of {schedule.name} is not"
            f" known to be. Use schedule='auto' or {ANY_WORKERS!r}"
        )
    return deal(schedule, sharding, heads_together, trips_without_circle(schedule, sharding))


def deal(schedule: Schedule, sharding: Sharding, heads_together: int, trips: tuple[Trips, ...]) -> SharedSchedule:
    """Put the legs of all heads into one sequence."""
    drafts = drafts_of(schedule, sharding, trips, heads_together)
    sequence = in_sequence(drafts, sharding.ranks)
    number_of = {index: number for number, index in enumerate(sequence)}
    units = [_numbered(drafts[index].unit, number, number_of) for number, index in enumerate(sequence)]
    waits = tuple(tuple(sorted(number_of[earlier] for earlier in drafts[index].waits)) for index in sequence)
    return SharedSchedule(schedule, sharding, heads_together, trips, tuple(units), waits)


def _numbered(unit: Unit, number: int, number_of: dict[int, int]) -> Unit:
    before, after = (None if index is None else number_of[index] for index in (unit.before, unit.after))
    return unit._replace(number=number, before=before, after=after)
