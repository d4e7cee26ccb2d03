"""What ranks run at once, in one global sequence.

A unit is one leg of one column, for heads of one kind side by side. It waits for states (the leg before, maybe on another rank)
and for turns (legs of other columns on the same rank). All units of all ranks are put into one sequence in which each comes
after those that it waits for, and each rank runs its own in that sequence. So the first unit that has not ended can always run:
ranks cannot hang, whatever the timing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from ..problem import Problem
from ..schedule import Schedule
from .sharding import Sharding
from .trips import Column, Leg, Trips

Head = tuple[int, int]  # sequence, part


class Unit(NamedTuple):
    """What a rank runs at once. Behind the last leg comes the ending: the rank of the keys adds dK and dV to their sums."""

    number: int  # in the global sequence
    rank: int
    kind: int
    heads: tuple[Head, ...]  # side by side
    column: int
    member: int  # how many query heads of their parts the chains have walked for
    leg: int | None  # None: the ending
    before: int | None = None  # the unit that the states come from; None: they begin here
    after: int | None = None  # the unit that they go to


@dataclass(frozen=True, eq=False)
class SharedSchedule:
    """A schedule whose queries and keys are shared by several ranks. Its bits are those of the schedule on one rank."""

    schedule: Schedule
    sharding: Sharding
    heads_together: int
    trips: tuple[Trips, ...]  # per kind
    units: tuple[Unit, ...]  # by number
    waits: tuple[tuple[int, ...], ...]  # per unit: the numbers of those that it waits for

    @property
    def problem(self) -> Problem:
        return self.schedule.problem

    def column_of(self, unit: Unit) -> Column:
        return self.trips[unit.kind].columns[unit.column]

    def leg_of(self, unit: Unit) -> Leg:
        assert unit.leg is not None, "an ending is no leg"
        return self.column_of(unit).legs[unit.leg]

    def tasks_of(self, unit: Unit) -> int:
        return 0 if unit.leg is None else len(unit.heads) * self.leg_of(unit).tasks

    def hops(self, unit: Unit) -> bool:
        """Whether the states of this unit go to another rank behind it."""
        return unit.after is not None and self.units[unit.after].rank != unit.rank

    def state_tiles(self, unit: Unit) -> int:
        """KV tiles whose states it has."""
        return len(unit.heads) * len(self.column_of(unit).kv_tiles)

    @cached_property
    def by_rank(self) -> tuple[tuple[Unit, ...], ...]:
        found: list[list[Unit]] = [[] for _ in range(self.sharding.ranks)]
        for unit in self.units:
            found[unit.rank].append(unit)
        return tuple(map(tuple, found))

    def describe(self, unit: Unit) -> str:
        """For errors: which rows of which keys, by whom."""
        column = self.column_of(unit)
        rows = self.problem.tile_kv
        keys = f"keys {column.kv_tiles[0] * rows} to {min((column.kv_tiles[-1] + 1) * rows, self.problem.kv_len) - 1}"
        if unit.leg is None:
            return f"the sums of {keys}"
        queries = self.sharding.rows_of_chunk(column.legs[unit.leg].chunk)
        return f"queries {queries.start} to {queries.stop - 1} (chunk {column.legs[unit.leg].chunk}) on {keys}"


def most_states(shared: SharedSchedule) -> list[int]:
    """How many states each rank has at once, at most, in KV tiles: they are there from the unit before, wherever that runs, until their
    own unit has run."""
    events: list[list[tuple[int, int]]] = [[] for _ in range(shared.sharding.ranks)]
    for unit in shared.units:
        tiles = shared.state_tiles(unit)
        since = unit.number if unit.before is None else unit.before + 1
        events[unit.rank] += [(since, tiles), (unit.number + 1, -tiles)]
    return [highest(each) for each in events]


def highest(events: Iterable[tuple[float, int]]) -> int:
    """The highest level, if each event (when, by how much) changes it. At one moment, what goes goes first."""
    return max(accumulate((change for _, change in sorted(events)), initial=0))
