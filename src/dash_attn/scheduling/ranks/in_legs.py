"""Any schedule on any number of workers of one rank: no chain has to be resident from the beginning of its walk to its end.

The chains of a gang wait for each other in a circle, but single tasks do not. So a cut of the walks that is fine enough leaves legs
without a circle; states rest in memory between them. It costs the time to load and store the states.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ..problem import Problem
from ..schedule import Schedule
from .sharding import Sharding
from .share import deal
from .trips import Circle, Trips, trips_of
from .units import SharedSchedule


def in_legs(schedule: Schedule, workers: int) -> SharedSchedule:
    """The schedule in legs for one rank with so many workers. Its bits are those of the schedule."""
    sharding, trips = _least_cut(schedule)
    return deal(schedule, sharding, workers, trips)  # side by side as many heads as keep every worker busy, with one chain each


def _least_cut(schedule: Schedule) -> tuple[Sharding, tuple[Trips, ...]]:
    """The fewest chunks of the queries that leave no circle, and the legs that they make. Two do on full masks."""
    for sharding in _cuts(schedule.problem):
        try:
            return sharding, trips_of(schedule, sharding)
        except Circle:
            continue
    # Tile by tile, chains with the same route together, there may still be a circle. Alone, a leg is one task.
    return sharding, trips_of(schedule, sharding, alone=True)


def _cuts(problem: Problem) -> Iterator[Sharding]:
    """Of the queries into 1, 2, 4, ... chunks of whole tiles, up to single tiles."""
    chunks = 1
    while True:
        ends = [problem.tile_q * (problem.q_tiles * number // chunks) for number in range(chunks)] + [problem.q_len]
        yield Sharding(tuple(end - begin for begin, end in pairwise(ends)), (0,) * chunks)
        if chunks == problem.q_tiles:
            return
        chunks = min(2 * chunks, problem.q_tiles)
