"""What devices run at once, in one global sequence.

A unit is one leg of one column, for heads of one kind side by side. It waits for states (the leg before, maybe on another device)
and for ranks (legs of other columns on the same device). All units of all devices are put into one sequence in which each comes
after those that it waits for, and each device runs its own in that sequence. So the first unit that has not ended can always run:
devices cannot hang, whatever the timing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from ..order import WORKER_INVARIANT
from ..problem import Problem, whole_number
from ..schedule import Schedule
from ..validate import ANY_WORKERS, ScheduleError
from .sharding import Sharding
from .trips import Column, Leg, Trips, followers_of, trips_of

Head = tuple[int, int]  # sequence, part


class Unit(NamedTuple):
    """What a device runs at once. Behind the last leg comes the ending: the device of the keys adds dK and dV to their sums."""

    number: int  # in the global sequence
    device: int
    kind: int
    heads: tuple[Head, ...]  # side by side
    column: int
    member: int  # how many query heads of their parts the chains have walked for
    leg: int | None  # None: the ending
    before: int | None  # the unit that the states come from; None: they begin here
    after: int | None  # the unit that they go to


@dataclass(frozen=True, eq=False)
class SharedSchedule:
    """A schedule whose queries and keys are shared by several devices. Its bits are those of the schedule on one device."""

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
        """Whether the states of this unit go to another device behind it."""
        return unit.after is not None and self.units[unit.after].device != unit.device

    def state_tiles(self, unit: Unit) -> int:
        """KV tiles whose states it has."""
        return len(unit.heads) * len(self.column_of(unit).kv_tiles)

    @cached_property
    def by_device(self) -> tuple[tuple[Unit, ...], ...]:
        found: list[list[Unit]] = [[] for _ in range(self.sharding.devices)]
        for unit in self.units:
            found[unit.device].append(unit)
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


def share(schedule: Schedule, sharding: Sharding, heads_together: int = 1) -> SharedSchedule:
    """Deal a schedule to the devices of a sharding. Raises ScheduleError where devices could wait for each other in a circle.

    heads_together: heads of one kind that a unit has side by side, at most. It decides time and memory alone.
    """
    sharding.check(schedule.problem)
    whole_number("heads_together", heads_together)
    if WORKER_INVARIANT not in schedule.order.guarantees:
        raise ScheduleError(
            f"devices that share a sequence need an order that is a function of the sequence alone; that of {schedule.name} is not"
            f" known to be. Use schedule='auto' or {ANY_WORKERS!r}"
        )
    return deal(schedule, sharding, heads_together, trips_of(schedule, sharding))


def deal(schedule: Schedule, sharding: Sharding, heads_together: int, trips: tuple[Trips, ...]) -> SharedSchedule:
    """Put the legs of all heads into one sequence."""
    drafts = list(_draft(schedule, sharding, trips, heads_together))
    return _put_in_sequence(schedule, sharding, heads_together, trips, drafts)


ROUND = 2  # bundles per device that take turns, where there is one kind of head


class _Draft(NamedTuple):
    """A unit without its number, and which drafts it waits for."""

    unit: Unit  # before and after are indices of drafts
    waits: tuple[int, ...]
    priority: tuple[int, ...]
    cost: int


def _bundles(schedule: Schedule, heads_together: int) -> Iterator[tuple[int, int, tuple[Head, ...]]]:
    """(kind, turn, heads side by side) of all heads. Those of a bundle have equally many members.

    The sequences of a KV head follow each other, so that its keys are needed for a short time."""
    problem, kinds = schedule.problem, len(schedule.order.kinds)
    for kind in range(kinds):
        heads = [
            (sequence, part)
            for part in range(problem.all_parts)
            for sequence in range(problem.batch)
            if schedule.order.kind_of(problem, part) == kind
        ]
        turn, bundle = 0, list[Head]()
        for head in heads:
            if bundle and (len(bundle) == heads_together or _members(problem, bundle[0]) != _members(problem, head)):
                yield kind, turn, tuple(bundle)
                turn, bundle = turn + 1, []
            bundle.append(head)
        if bundle:
            yield kind, turn, tuple(bundle)


def _members(problem: Problem, head: Head) -> int:
    return len(problem.members(head[1]))


def _draft(schedule: Schedule, sharding: Sharding, trips: tuple[Trips, ...], heads_together: int) -> Iterator[_Draft]:
    """All units. The first to be launched is the one with the lowest priority: pairs of bundles, one of each kind, take turns; in a
    pair segment by segment, and then by how many units come before. So the heads of a kind end where those of the other begin.

    Heads of a single kind all begin on the same device. There many of them go in a round, segment by segment: the devices are busy
    with different heads then, because the segments of a head follow each other around all devices.
    """
    problem, count = schedule.problem, 0
    in_round = 1 if len(trips) > 1 else ROUND * sharding.devices
    endings: dict[tuple[int, int, int, int], int] = {}  # the last one of a sum: kind, column, sequence, KV head
    for kind, turn, heads in _bundles(schedule, heads_together):
        mine = trips[kind]
        members = _members(problem, heads[0])
        deepest = int(mine.level.max(initial=0)) + 1
        waits_of: list[list[int]] = [[] for _ in range(mine.nodes)]
        for earlier, later in mine.edges.tolist():
            waits_of[later].append(earlier)
        width = mine.nodes  # drafts of a bundle: member by member all legs, then the endings of all columns
        for member in range(members):
            for column, found in enumerate(mine.columns):
                first, last = int(mine.first_node[column]), len(found.legs) - 1
                for leg, there in enumerate(found.legs):
                    node = first + leg
                    base = count + member * width
                    before = base + node - 1 if leg else (count + (member - 1) * width + first + last if member else None)
                    after = base + node + 1 if leg < last else None
                    if leg == last:
                        after = count + (member + 1) * width + first if member + 1 < members else count + members * width + column
                    waits = [base + other for other in waits_of[node]] + ([before] if leg == 0 and before is not None else [])
                    level = member * deepest + int(mine.level[node])
                    unit = Unit(0, sharding.owners[there.chunk], kind, heads, column, member, leg, before, after)
                    yield _Draft(unit, tuple(waits), (turn // in_round, found.segment, turn, kind, level, node), len(heads) * there.tasks)
        for column, found in enumerate(mine.columns):
            last_leg = count + (members - 1) * width + int(mine.first_node[column]) + len(found.legs) - 1 if found.legs else None
            places = [(kind, column, sequence, part // problem.parts) for sequence, part in heads]
            waits = [endings[place] for place in places if place in endings] + ([] if last_leg is None else [last_leg])
            number = count + members * width + column
            endings.update(dict.fromkeys(places, number))
            unit = Unit(0, sharding.owners[found.chunk], kind, heads, column, members - 1, None, last_leg, None)
            priority = (turn // in_round, found.segment, turn, kind, members * deepest, mine.nodes + column)
            yield _Draft(unit, tuple(sorted(set(waits))), priority, 0)
        count += members * width + len(mine.columns)


HOP = 20  # what a hop is thought to take: one part in so many of the largest unit


def _put_in_sequence(
    schedule: Schedule, sharding: Sharding, heads_together: int, trips: tuple[Trips, ...], drafts: list[_Draft]
) -> SharedSchedule:
    sequence = _Sequencer(drafts, sharding.devices).run()
    assert len(sequence) == len(drafts), "trips have no circle, and sums are added part after part"
    number_of = {index: number for number, index in enumerate(sequence)}
    units = [_numbered(drafts[index].unit, number, number_of) for number, index in enumerate(sequence)]
    waits = tuple(tuple(sorted(number_of[earlier] for earlier in drafts[index].waits)) for index in sequence)
    return SharedSchedule(schedule, sharding, heads_together, trips, tuple(units), waits)


class _Sequencer:
    """A list schedule in which a task takes one unit of time: a free device starts the ready unit of least priority.

    Devices keep to the sequence. So a hop must take some time here: else a device would be told to wait for states that have just left
    another one, with other work at hand. How long hardly matters (docs/simulator.md).
    """

    def __init__(self, drafts: list[_Draft], devices: int) -> None:
        self.drafts, self.devices = drafts, devices
        self.hop = max((draft.cost for draft in drafts), default=0) // HOP
        self.waiting = [len(draft.waits) for draft in drafts]
        edges = [(earlier, later) for later, draft in enumerate(drafts) for earlier in draft.waits]
        self.followers = followers_of(len(drafts), np.array(edges, dtype=np.int64).reshape(-1, 2))
        self.ready: list[list[tuple[tuple[int, ...], int]]] = [[] for _ in range(devices)]
        self.events: list[tuple[int, bool, int]] = []  # when, whether something has arrived at this draft (else: it has ended), which

    def run(self) -> list[int]:
        """The drafts in the order in which they start."""
        for index, waiting in enumerate(self.waiting):
            if not waiting:
                self._make_ready(index)
        idle, sequence, now = set(range(self.devices)), list[int](), 0
        while True:
            for device in sorted(idle):
                if self.ready[device]:
                    index = heappop(self.ready[device])[1]
                    sequence.append(index)
                    heappush(self.events, (now + self.drafts[index].cost, False, index))
                    idle.remove(device)
            if not self.events:
                return sequence
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                _, arrived, index = heappop(self.events)
                if arrived:
                    self._arrive(index)
                else:
                    idle.add(self.drafts[index].unit.device)
                    self._end(index, now)

    def _end(self, index: int, now: int) -> None:
        for follower in self.followers[index]:
            hops = self.drafts[follower].unit.device != self.drafts[index].unit.device
            if hops and self.hop:
                heappush(self.events, (now + self.hop, True, follower))
            else:
                self._arrive(follower)

    def _arrive(self, index: int) -> None:
        self.waiting[index] -= 1
        if not self.waiting[index]:
            self._make_ready(index)

    def _make_ready(self, index: int) -> None:
        draft = self.drafts[index]
        heappush(self.ready[draft.unit.device], (draft.priority, index))


def _numbered(unit: Unit, number: int, number_of: dict[int, int]) -> Unit:
    before, after = (None if index is None else number_of[index] for index in (unit.before, unit.after))
    return unit._replace(number=number, before=before, after=after)
