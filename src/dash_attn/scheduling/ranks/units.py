"""Where the walks of an order go from rank to rank, and what ranks run at once, in one global sequence.

A chunk boundary cuts the walk of a chain into legs: stretches of consecutive tasks whose Q tiles lie in one chunk. Between two legs
the state of the chain, its float32 dK and dV, hops to the next chunk's rank. Chains whose legs lie in the same chunks travel
together; they are a column.

A unit is one leg of one column, for heads of one kind side by side. It waits for states (the leg before, maybe on another rank)
and for turns (legs of other columns on the same rank). All units of all ranks are put into one sequence in which each comes
after those that it waits for, and each rank runs its own in that sequence. So the first unit that has not ended can always run:
ranks cannot hang, whatever the timing.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import ScheduleError
from ..order import HeadOrder
from ..problem import Problem
from ..schedule import Schedule
from ..validate import ANY_WORKERS
from .sharding import Sharding

Edges = NDArray[np.int64]  # rows (earlier, later)
Bounds = dict[int, tuple[int, ...]]  # of a KV tile: where each leg of its walk begins, and where the last one ends
Route = tuple[int, ...]  # the segment of a chain, the chunk of its keys, and the chunks that it walks through
Together = dict[tuple[int, Route], list[int]]  # KV tiles of a column, by their route and a number that sets them apart
Head = tuple[int, int]  # sequence, part


class Circle(ScheduleError):
    """Legs wait for each other in a circle. Shorter legs may not."""


class Leg(NamedTuple):
    """A stretch of the walks of a column that lies in one chunk of the queries."""

    chunk: int
    kv_tiles: tuple[int, ...]  # in an order in which chains wait only for those before them
    tasks: int


class Column(NamedTuple):
    """KV tiles whose states travel together: their keys are in one chunk, they start in one segment, their legs are in the same chunks."""

    segment: int
    chunk: int  # of the keys
    kv_tiles: tuple[int, ...]
    legs: tuple[Leg, ...]

    def __str__(self) -> str:
        first, last = self.kv_tiles[0], self.kv_tiles[-1]
        return f"kv{first}" if first == last else f"kv{first}..kv{last}"


@dataclass(frozen=True, eq=False)
class Trips:
    """The columns of a kind of head, and which legs wait for which. Leg i of column c is node first_node[c] + i."""

    columns: tuple[Column, ...]
    bounds: Bounds
    edges: Edges

    @cached_property
    def first_node(self) -> NDArray[np.int64]:
        return np.cumsum([0, *(len(column.legs) for column in self.columns)])

    @property
    def nodes(self) -> int:
        return int(self.first_node[-1])

    @cached_property
    def level(self) -> NDArray[np.int64]:
        """How many legs each leg comes after, on the longest way."""
        return levels(self.nodes, self.edges)

    @property
    def depth(self) -> int:
        """Levels of all legs."""
        return int(self.level.max(initial=0)) + 1

    @cached_property
    def waits(self) -> list[list[tuple[int, int]]]:
        """The legs that each node waits for: column, and number of the leg in it."""
        legs = [(number, leg) for number, column in enumerate(self.columns) for leg in range(len(column.legs))]
        found: list[list[tuple[int, int]]] = [[] for _ in legs]
        for earlier, later in self.edges.tolist():
            found[later].append(legs[earlier])
        return found

    def steps(self, kv_tile: int, leg: int) -> slice:
        """The part of a chain's walk that is a leg."""
        bounds = self.bounds[kv_tile]
        return slice(bounds[leg], bounds[leg + 1])


def trips_without_circle(schedule: Schedule, sharding: Sharding) -> tuple[Trips, ...]:
    """In the largest columns that have none. A chain that comes between two others of a column waits for it, and it for the chain:
    then columns are of neighbours. Raises Circle where these have one, too."""
    try:
        return trips_of(schedule, sharding)
    except Circle:
        return trips_of(schedule, sharding, neighbours=True)


def trips_of(schedule: Schedule, sharding: Sharding, alone: bool = False, neighbours: bool = False) -> tuple[Trips, ...]:
    """Of every kind of head. Raises Circle where legs would wait for each other in one.

    alone: every KV tile is a column of its own. neighbours: columns are of chains that start one after another.
    """
    placement = schedule.placement
    cuts = np.cumsum(placement.segments)
    found = []
    for number, (order, start) in enumerate(zip(schedule.order.kinds, placement.starts, strict=True)):
        segments = np.searchsorted(cuts, np.arange(order.kv_tiles), side="right")
        starts = dict(zip(start.tolist(), segments.tolist(), strict=True))
        found.append(_Cut(schedule.problem, order, sharding, starts, f"{schedule.name}, kind {number}").trips(alone, neighbours))
    return tuple(found)


class _Cut:
    """Cuts the walks of one kind of head. starts: KV tiles in the order in which they start, and the segment of each."""

    def __init__(self, problem: Problem, order: HeadOrder, sharding: Sharding, starts: dict[int, int], name: str) -> None:
        self.order, self.starts, self.name = order, starts, name
        self.chunk_of_q, self.chunk_of_kv = sharding.chunk_of_tiles(problem.tile_q), sharding.chunk_of_kv_tiles(problem)

    def trips(self, alone: bool, neighbours: bool) -> Trips:
        bounds: Bounds = {}
        routes: dict[int, Route] = {}
        for kv_tile in range(self.order.kv_tiles):
            chunks = self.chunk_of_q[self.order.walk(kv_tile)]
            begins = [0, *(np.flatnonzero(np.diff(chunks)) + 1).tolist()] if len(chunks) else []
            bounds[kv_tile] = (*begins, len(chunks))
            routes[kv_tile] = self.starts[kv_tile], int(self.chunk_of_kv[kv_tile]), *chunks[begins].tolist()
        together: Together = defaultdict(list)
        run, last = 0, None
        for kv_tile in self.starts if neighbours else routes:
            route = routes[kv_tile]
            run, last = run + (route != last), route
            together[kv_tile if alone else run if neighbours else 0, route].append(kv_tile)
        return self._in_columns(together, bounds)

    def _in_columns(self, together: Together, bounds: Bounds) -> Trips:
        node, first_node = self._nodes(together, bounds)
        between, inside = self._waits(node)
        columns, edges = [], list(between)
        for first, ((_, (segment, chunk, *route)), kv_tiles) in zip(first_node, together.items(), strict=True):
            legs = []
            for leg, where in enumerate(route):
                tasks = sum(bounds[kv_tile][leg + 1] - bounds[kv_tile][leg] for kv_tile in kv_tiles)
                legs.append(Leg(where, self._in_order(kv_tiles, inside[first + leg], where), tasks))
            columns.append(Column(segment, chunk, tuple(kv_tiles), tuple(legs)))
            edges += [(first + leg, first + leg + 1) for leg in range(len(route) - 1)]
        made = Trips(tuple(columns), bounds, np.array(sorted(set(edges)), dtype=np.int64).reshape(-1, 2))
        self._check(made)
        return made

    def _nodes(self, together: Together, bounds: Bounds) -> tuple[NDArray[np.int64], list[int]]:
        """The node of every task, and the first node of every column."""
        legs = np.concatenate([np.repeat(np.arange(len(cut) - 1), np.diff(cut)) for cut in bounds.values()])
        first_node = list(accumulate((len(route) - 2 for _, route in together), initial=0))[:-1]
        first_of_chain = np.zeros(self.order.kv_tiles, dtype=np.int64)
        for first, kv_tiles in zip(first_node, together.values(), strict=True):
            first_of_chain[kv_tiles] = first
        return first_of_chain[self.order.chain] + legs, first_node

    def _waits(self, node: NDArray[np.int64]) -> tuple[list[tuple[int, int]], dict[int, list[tuple[int, int]]]]:
        """Pairs of nodes that hand dQ tiles over, and the pairs of chains that do so inside of each node."""
        earlier, later = self.order.hand_overs
        chain, kv_tiles = self.order.chain.astype(np.int64), self.order.kv_tiles
        same = node[earlier] == node[later]
        count = int(node.max(initial=0)) + 1
        between = np.unique(node[earlier[~same]] * count + node[later[~same]])
        within = np.unique((node[earlier[same]] * kv_tiles + chain[earlier[same]]) * kv_tiles + chain[later[same]])
        inside: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for pair in within.tolist():
            where, pair = divmod(pair, kv_tiles**2)
            inside[where].append(divmod(pair, kv_tiles))
        return list(zip((between // count).tolist(), (between % count).tolist(), strict=True)), inside

    def _in_order(self, kv_tiles: list[int], waits: list[tuple[int, int]], chunk: int) -> tuple[int, ...]:
        """Chains of a leg, each behind those that it waits for."""
        place = {kv_tile: index for index, kv_tile in enumerate(kv_tiles)}
        edges = np.array([(place[first], place[second]) for first, second in waits], dtype=np.int64).reshape(-1, 2)
        level = levels(len(kv_tiles), edges)
        if (level < 0).any():
            stuck = [f"kv{kv_tiles[index]}" for index in np.flatnonzero(level < 0)]
            raise Circle(self._in_a_circle(f"chains {', '.join(stuck[:4])} of chunk {chunk}"))
        return tuple(kv_tiles[index] for index in np.argsort(level, kind="stable"))

    def _check(self, trips: Trips) -> None:
        if not (trips.level < 0).any():
            return
        names = [f"{column} in chunk {leg.chunk}" for column in trips.columns for leg in column.legs]
        stuck = [names[node] for node in np.flatnonzero(trips.level < 0)]
        raise Circle(self._in_a_circle("; ".join(stuck[:4])))

    def _in_a_circle(self, who: str) -> str:
        return (
            f"{self.name}: its walks, cut where a row's rank changes, wait for each other in a circle, so that ranks cannot run them"
            f" one after another ({who}). schedule={ANY_WORKERS!r} serves every mask on any number of ranks; its bits are different, so"
            " use it on one rank, too"
        )


def levels(nodes: int, edges: Edges) -> NDArray[np.int64]:
    """Of each node: the edges on the longest way to it; -1 for nodes in a circle and those behind one."""
    level = np.zeros(nodes, dtype=np.int64)
    waits = np.bincount(edges[:, 1], minlength=nodes) if len(edges) else np.zeros(nodes, dtype=np.int64)
    followers: dict[int, list[int]] = defaultdict(list)
    for earlier, later in edges.tolist():
        followers[earlier].append(later)
    free = np.flatnonzero(waits == 0).tolist()
    done = 0
    while free:
        node = free.pop()
        done += 1
        for follower in followers[node]:
            level[follower] = max(level[follower], level[node] + 1)
            waits[follower] -= 1
            if waits[follower] == 0:
                free.append(follower)
    if done < nodes:
        level[waits > 0] = -1
    return level


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
