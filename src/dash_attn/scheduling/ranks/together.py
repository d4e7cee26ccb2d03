"""How many heads a unit should have side by side. It decides time and memory alone, never bits."""

from __future__ import annotations

import numpy as np

from ..schedule import Schedule
from .sharding import Sharding
from .trips import trips_without_circle

FILLINGS = 4  # chains of a unit per worker (docs/simulator.md)


def heads_that_fill(schedule: Schedule, sharding: Sharding, workers: int) -> int:
    """How many heads of one kind a unit should have side by side.

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
