"""A schedule for any mask: chains claim Q tiles so that they follow each other at a distance.

Chains are taken from the shortest to the longest. Each walks its Q tiles in the order in which the chains before it
release them (sorting by release time is optimal for one chain), and ranks behind them. Odd heads are the mirror
image in time, so that over a pair of heads long chains follow short ones on every worker. Chains wait only for
earlier starts: no gang, any number of workers.
"""

from __future__ import annotations

import numpy as np

from ..order import HeadOrder, Order, rank_within
from ..problem import Problem
from ..schedule import Schedule
from .spt import shortest_first

DISTANCE = 2  # steps a hand-over takes on an H200


def weave(problem: Problem, workers: int) -> Schedule:
    start = shortest_first(problem)
    released = np.zeros(problem.q_tiles, dtype=np.int64)
    walks: list[np.ndarray] = [np.arange(0)] * problem.kv_tiles
    for kv_tile in start:
        wanted = np.flatnonzero(problem.kept[:, kv_tile])
        walk = wanted[np.argsort(released[wanted], kind="stable")]
        position = np.arange(len(walk))
        step = np.maximum.accumulate(released[walk] - position) + position
        released[walk] = step + DISTANCE
        walks[kv_tile] = walk
    chain = np.repeat(np.arange(problem.kv_tiles), [len(w) for w in walks])
    q_tile = np.concatenate(walks).astype(np.int64)
    rank = rank_within(q_tile, np.argsort(start)[chain])
    up = HeadOrder.build(chain, q_tile, rank, np.zeros(problem.kv_tiles))
    return Schedule.build(problem, Order("weave", (up, up.mirrored())), (start, start[::-1]), workers)
