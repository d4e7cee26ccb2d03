"""Deals a schedule to ranks: its legs become units, and those one sequence.

One rank alone runs any schedule in legs on any number of workers: then no chain has to be resident from the beginning of its walk to its
end. The chains of a gang wait for each other in a circle, but single tasks do not. So a cut of the walks that is fine enough leaves legs
without a circle; states rest in memory between them. It costs the time to load and store the states.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from ...errors import ScheduleError
from ..engine import Progress
from ..order import WORKER_INVARIANT
from ..problem import Problem, whole_number
from ..schedule import Schedule
from ..validate import ANY_WORKERS
from .sharding import Sharding
from .units import Circle, Head, SharedSchedule, Trips, Unit, trips_of, trips_without_circle

FILLINGS = 4  # chains of a unit per worker (docs/simulator.md)
ROUND = 2  # bundles per rank that take turns, where there is one kind of head
HOP = 20  # what a hop is thought to take: one part in so many of the largest unit


def share(schedule: Schedule, sharding: Sharding, heads_together: int = 1, progress: Progress | None = None) -> SharedSchedule:
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
    return deal(schedule, sharding, heads_together, trips_without_circle(schedule, sharding), progress)


def deal(schedule: Schedule, sharding: Sharding, together: int, trips: tuple[Trips, ...], progress: Progress | None) -> SharedSchedule:
    """Put the legs of all heads into one sequence."""
    tell = progress or (lambda done, total: None)
    drafts = _drafts(schedule, sharding, trips, together, tell)
    sequence = _Sequencer(drafts, sharding.ranks).run(tell)
    assert len(sequence) == len(drafts), "trips have no circle, and sums are added part after part"
    number_of: dict[int | None, int] = {place: number for number, place in enumerate(sequence)}
    units, waits = [], []
    for number, draft in enumerate(drafts[place] for place in sequence):
        before, after = (number_of.get(place) for place in (draft.unit.before, draft.unit.after))
        units.append(draft.unit._replace(number=number, before=before, after=after))
        waits.append(tuple(sorted(number_of[earlier] for earlier in draft.waits)))
    return SharedSchedule(schedule, sharding, together, trips, tuple(units), tuple(waits))


def heads_that_fill(schedule: Schedule, sharding: Sharding, workers: int) -> int:
    """How many heads of one kind a unit should have side by side. It decides time and memory alone, never bits.

    As many as give every worker some chains, dealt evenly to turns: where all chains of a unit start at once, they wait for each other
    at the same Q tiles, and no other work is there meanwhile. No more, because states take memory. Where heads have one kind, enough
    units are left for all ranks: there the segments of a head go around the ranks one by one.
    """
    problem, kinds = schedule.problem, len(schedule.order.kinds)
    chains = [len(column.kv_tiles) for trips in trips_without_circle(schedule, sharding) for column in trips.columns if column.legs]
    heads = problem.batch * -(-problem.all_parts // kinds)
    enough = max(1, round(FILLINGS * workers / np.median(chains))) if chains else 1
    if kinds == 1:
        enough = min(enough, max(1, heads // sharding.ranks))
    turns = max(1, round(heads / enough))
    return -(-heads // turns)


class _Draft(NamedTuple):
    """A unit that has no number yet. Instead it has its place among the drafts, and those of others."""

    unit: Unit
    waits: set[int]
    priority: tuple[int, ...]  # of ready units, a rank starts the one with the least
    cost: int  # in tasks


@dataclass(frozen=True, eq=False)
class _Bundle:
    """Heads of one kind that go side by side: member by member all legs of a column, then its ending."""

    kind: int
    turn: int
    heads: tuple[Head, ...]
    members: int  # query heads of each
    trips: Trips
    first: int  # the place of its first draft

    def place(self, column: int, member: int, leg: int) -> int:
        """Of a draft. The trip of a query head begins where that of the one before has ended."""
        endings, legs = column, len(self.trips.columns[column].legs)
        return self.first + int(self.trips.first_node[column]) * self.members + endings + member * legs + leg


def _drafts(schedule: Schedule, sharding: Sharding, trips: tuple[Trips, ...], heads_together: int, tell: Progress) -> list[_Draft]:
    """The first to be launched is the one with the least priority: pairs of bundles, one of each kind, take turns; in a pair segment by
    segment, and then by how many units come before. So the heads of a kind end where those of the other begin.

    Heads of a single kind all begin on the same rank. There many of them go in a round, segment by segment: the ranks are busy
    with different heads then, because the segments of a head follow each other around all ranks.
    """
    in_round = 1 if len(trips) > 1 else ROUND * sharding.ranks
    drafts: list[_Draft] = []
    last_endings: dict[tuple[int, ...], int] = {}  # of each sum: kind, column, sequence, KV head
    for bundle in _bundles(schedule, trips, heads_together):
        for column in range(len(bundle.trips.columns)):
            tell(0, 1)  # how many there will be is not known yet
            drafts += _of_column(bundle, column, sharding, in_round)
            # Parts of a group are added in order: an ending waits for those of earlier parts.
            ending, waits, *_ = drafts[-1]
            sums = [(bundle.kind, column, sequence, part // schedule.problem.parts) for sequence, part in bundle.heads]
            waits.update(last_endings[place] for place in sums if place in last_endings)
            last_endings.update(dict.fromkeys(sums, ending.number))
    return drafts


def _bundles(schedule: Schedule, trips: tuple[Trips, ...], heads_together: int) -> Iterator[_Bundle]:
    """Those of a bundle have equally many members. The sequences of a KV head follow each other, so that its keys are needed for a short
    time."""
    problem, first = schedule.problem, 0
    for kind, (mine, parts) in enumerate(zip(trips, schedule.placement.heads_of_kinds(problem), strict=True)):
        heads = [(sequence, part) for part in parts.tolist() for sequence in range(problem.batch)]
        turn = 0
        while heads:
            members = _members(problem, heads[0])
            count = next((i for i, head in enumerate(heads[:heads_together]) if _members(problem, head) != members), heads_together)
            yield _Bundle(kind, turn, tuple(heads[:count]), members, mine, first)
            heads, turn, first = heads[count:], turn + 1, first + mine.nodes * members + len(mine.columns)


def _members(problem: Problem, head: Head) -> int:
    return len(problem.members(head[1]))


def _of_column(bundle: _Bundle, column: int, sharding: Sharding, in_round: int) -> Iterator[_Draft]:
    trips, found = bundle.trips, bundle.trips.columns[column]
    stops: list[tuple[int, int | None]] = [*product(range(bundle.members), range(len(found.legs))), (bundle.members, None)]
    begin = bundle.place(column, 0, 0)
    for number, (member, leg) in enumerate(stops, begin):
        before = number - 1 if number > begin else None
        if leg is None:  # the ending
            unit = Unit(number, sharding.owners[found.chunk], bundle.kind, bundle.heads, column, member - 1, None, before)
            node, level, waits, cost = trips.nodes + column, 0, set[int](), 0
        else:
            unit = Unit(number, sharding.owners[found.legs[leg].chunk], bundle.kind, bundle.heads, column, member, leg, before, number + 1)
            node, cost = int(trips.first_node[column]) + leg, len(bundle.heads) * found.legs[leg].tasks
            level, waits = int(trips.level[node]), {bundle.place(other, member, its_leg) for other, its_leg in trips.waits[node]}
        waits |= {before} if before is not None else set()
        priority = bundle.turn // in_round, found.segment, bundle.turn, bundle.kind, member * trips.depth + level, node
        yield _Draft(unit, waits, priority, cost)


class _Sequencer:
    """A list schedule in which a task takes one unit of time: a free rank starts the ready unit of least priority.

    Ranks keep to the sequence. So a hop must take some time here: else a rank would be told to wait for states that have just left
    another one, with other work at hand. How long hardly matters (docs/simulator.md).
    """

    def __init__(self, drafts: list[_Draft], ranks: int) -> None:
        self.drafts = drafts
        self.hop = max((draft.cost for draft in drafts), default=0) // HOP
        self.missing = [len(draft.waits) + 1 for draft in drafts]  # what has not arrived; first, that we begin
        self.followers: list[list[int]] = [[] for _ in drafts]
        for place, draft in enumerate(drafts):
            for earlier in draft.waits:
                self.followers[earlier].append(place)
        self.ready: list[list[tuple[tuple[int, ...], int]]] = [[] for _ in range(ranks)]
        self.events: list[tuple[int, bool, int]] = []  # when, whether something has arrived at this place (else: it has ended), which

    def run(self, tell: Progress) -> list[int]:
        """The places in the order in which their units start. Each comes after those that it waits for."""
        for place in range(len(self.drafts)):
            self._arrive(place)
        idle, sequence, now = set(range(len(self.ready))), list[int](), 0
        while True:
            for rank in [rank for rank in sorted(idle) if self.ready[rank]]:
                place = heappop(self.ready[rank])[1]
                sequence.append(place)
                heappush(self.events, (now + self.drafts[place].cost, False, place))
                idle.remove(rank)
            if not self.events:
                return sequence
            tell(len(sequence), len(self.drafts))
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                _, arrived, place = heappop(self.events)
                if arrived:
                    self._arrive(place)
                else:
                    idle.add(self.drafts[place].unit.rank)
                    self._end(place, now)

    def _end(self, place: int, now: int) -> None:
        for follower in self.followers[place]:
            if self.hop and self.drafts[follower].unit.rank != self.drafts[place].unit.rank:
                heappush(self.events, (now + self.hop, True, follower))
            else:
                self._arrive(follower)

    def _arrive(self, place: int) -> None:
        self.missing[place] -= 1
        if not self.missing[place]:
            draft = self.drafts[place]
            heappush(self.ready[draft.unit.rank], (draft.priority, place))


def in_legs(schedule: Schedule, workers: int) -> SharedSchedule:
    """The schedule in legs for one rank with so many workers. Its bits are those of the schedule."""
    for sharding in _cuts(schedule.problem):  # the fewest chunks of the queries that leave no circle: two do on full masks
        try:
            trips = trips_of(schedule, sharding)
            break
        except Circle:
            continue
    else:  # tile by tile, chains with the same route together, there may still be a circle; alone, a leg is one task
        trips = trips_of(schedule, sharding, alone=True)
    return deal(schedule, sharding, workers, trips, None)  # side by side as many heads as keep every worker busy, with one chain each


def _cuts(problem: Problem) -> Iterator[Sharding]:
    """Of the queries into 1, 2, 4, ... chunks of whole tiles, up to single tiles."""
    chunks = 1
    while True:
        ends = [problem.tile_q * (problem.q_tiles * number // chunks) for number in range(chunks)] + [problem.q_len]
        yield Sharding(tuple(end - begin for begin, end in pairwise(ends)), (0,) * chunks)
        if chunks == problem.q_tiles:
            return
        chunks = min(2 * chunks, problem.q_tiles)
