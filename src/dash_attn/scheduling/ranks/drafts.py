"""All units of a shared schedule, before they are put into a sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..problem import Problem
from ..schedule import Schedule
from .sharding import Sharding
from .trips import Trips
from .units import Head, Unit

ROUND = 2  # bundles per rank that take turns, where there is one kind of head


class Draft(NamedTuple):
    """A unit without its number. Where it names other units, those are places in the list of drafts."""

    unit: Unit
    waits: tuple[int, ...]
    priority: tuple[int, ...]  # of ready units, a rank starts the one with the least
    cost: int  # in tasks


@dataclass(frozen=True, eq=False)
class _Bundle:
    """Heads of one kind that go side by side, and where their drafts are: member by member all legs, then the endings of all columns."""

    kind: int
    turn: int
    heads: tuple[Head, ...]
    members: int  # query heads of each
    trips: Trips
    first: int

    @property
    def size(self) -> int:
        return self.members * self.trips.nodes + len(self.trips.columns)

    def node(self, member: int, node: int) -> int:
        return self.first + member * self.trips.nodes + node

    def leg(self, member: int, column: int, leg: int) -> int:
        return self.node(member, int(self.trips.first_node[column]) + leg)

    def ending(self, column: int) -> int:
        return self.first + self.members * self.trips.nodes + column

    def before(self, member: int, column: int, leg: int) -> int | None:
        """Where the states of a leg come from. The trip of a query head begins where that of the one before has ended."""
        if leg:
            return self.leg(member, column, leg - 1)
        return self.leg(member - 1, column, len(self.trips.columns[column].legs) - 1) if member else None

    def after(self, member: int, column: int, leg: int) -> int:
        """Where they go to."""
        if leg + 1 < len(self.trips.columns[column].legs):
            return self.leg(member, column, leg + 1)
        return self.leg(member + 1, column, 0) if member + 1 < self.members else self.ending(column)

    @cached_property
    def depth(self) -> int:
        """Levels of one member's legs."""
        return int(self.trips.level.max(initial=0)) + 1


def drafts_of(schedule: Schedule, sharding: Sharding, trips: tuple[Trips, ...], heads_together: int) -> list[Draft]:
    """The first to be launched is the one with the least priority: pairs of bundles, one of each kind, take turns; in a pair segment by
    segment, and then by how many units come before. So the heads of a kind end where those of the other begin.

    Heads of a single kind all begin on the same rank. There many of them go in a round, segment by segment: the ranks are busy
    with different heads then, because the segments of a head follow each other around all ranks.
    """
    in_round = 1 if len(trips) > 1 else ROUND * sharding.ranks
    drafts: list[Draft] = []
    last_endings: dict[tuple[int, int, int, int], int] = {}  # of each sum: kind, column, sequence, KV head
    for bundle in _bundles(schedule, trips, heads_together):
        drafts += _legs(bundle, sharding, in_round)
        drafts += _endings(bundle, sharding, in_round, schedule.problem, last_endings)
    return drafts


def _bundles(schedule: Schedule, trips: tuple[Trips, ...], heads_together: int) -> Iterator[_Bundle]:
    """Those of a bundle have equally many members. The sequences of a KV head follow each other, so that its keys are needed for a short
    time."""
    problem, first = schedule.problem, 0
    for kind, mine in enumerate(trips):
        parts = [part for part in range(problem.all_parts) if schedule.order.kind_of(problem, part) == kind]
        heads = [(sequence, part) for part in parts for sequence in range(problem.batch)]
        turn = 0
        while heads:
            members = _members(problem, heads[0])
            count = next((i for i, head in enumerate(heads[:heads_together]) if _members(problem, head) != members), heads_together)
            bundle = _Bundle(kind, turn, tuple(heads[:count]), members, mine, first)
            yield bundle
            heads, turn, first = heads[count:], turn + 1, first + bundle.size


def _members(problem: Problem, head: Head) -> int:
    return len(problem.members(head[1]))


def _legs(bundle: _Bundle, sharding: Sharding, in_round: int) -> Iterator[Draft]:
    trips = bundle.trips
    waits_of: list[list[int]] = [[] for _ in range(trips.nodes)]
    for earlier, later in trips.edges.tolist():
        waits_of[later].append(earlier)
    for member in range(bundle.members):
        for column, found in enumerate(trips.columns):
            for leg, there in enumerate(found.legs):
                node = int(trips.first_node[column]) + leg
                before, after = bundle.before(member, column, leg), bundle.after(member, column, leg)
                waits = {bundle.node(member, other) for other in waits_of[node]} | ({before} if before is not None else set())
                level = member * bundle.depth + int(trips.level[node])
                unit = Unit(0, sharding.owners[there.chunk], bundle.kind, bundle.heads, column, member, leg, before, after)
                priority = (bundle.turn // in_round, found.segment, bundle.turn, bundle.kind, level, node)
                yield Draft(unit, tuple(sorted(waits)), priority, len(bundle.heads) * there.tasks)


def _endings(
    bundle: _Bundle, sharding: Sharding, in_round: int, problem: Problem, last_endings: dict[tuple[int, int, int, int], int]
) -> Iterator[Draft]:
    """Parts of a group are added in order: an ending waits for those of earlier parts."""
    for column, found in enumerate(bundle.trips.columns):
        before = bundle.leg(bundle.members - 1, column, len(found.legs) - 1) if found.legs else None
        sums = [(bundle.kind, column, sequence, part // problem.parts) for sequence, part in bundle.heads]
        waits = {last_endings[place] for place in sums if place in last_endings} | ({before} if before is not None else set())
        last_endings.update(dict.fromkeys(sums, bundle.ending(column)))
        unit = Unit(0, sharding.owners[found.chunk], bundle.kind, bundle.heads, column, bundle.members - 1, None, before, None)
        level = bundle.members * bundle.depth
        priority = (bundle.turn // in_round, found.segment, bundle.turn, bundle.kind, level, bundle.trips.nodes + column)
        yield Draft(unit, tuple(sorted(waits)), priority, 0)
