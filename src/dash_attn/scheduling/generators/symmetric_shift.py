"""DASH's symmetric shift for causal masks: KV tile i and its mirror n-1-i run one after the other on one worker.

The chains of the first half walk the rectangle of Q tiles they all share cyclically, each from its own offset, then
their own part of the triangle upward; the mirror chains walk down from the last Q tile. On square problems all
workers of a head touch different Q tiles in every step. An odd tile count leaves a middle chain of its own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...errors import ScheduleError
from ..order import ALL_GUARANTEES, HeadOrder, Order, frozen_ints, turn_within
from ..problem import Problem, whole_number
from ..schedule import Placement, Schedule


def symmetric_shift(problem: Problem, workers: int) -> Schedule:
    first_q = _first_q_tiles(problem)
    n, q_tiles = problem.kv_tiles, problem.q_tiles
    half = n // 2
    walks = [np.arange(q_tiles - 1, first - 1, -1) for first in first_q]  # down: those of the second half, and the middle one
    first_step = np.zeros(n, dtype=np.int64)
    shared = first_q[half - 1] if half else 0  # the rectangle: Q tiles every chain of the first half visits
    for i in range(half):
        offset = first_q[i] - first_q[0]
        rectangle = shared + (np.arange(q_tiles - shared) + offset) % max(1, q_tiles - shared)
        walks[i] = np.concatenate([rectangle, np.arange(first_q[i], shared)])
        first_step[n - 1 - i] = len(walks[i])
    chain = np.repeat(np.arange(n), [len(w) for w in walks])
    q_tile = np.concatenate(walks)
    position = np.arange(len(chain)) - np.searchsorted(chain, chain, side="left")
    turn = turn_within(q_tile, first_step[chain] + position, chain)
    kind = HeadOrder.build(chain, q_tile, turn, first_step)
    workers = whole_number("workers", workers)
    start = frozen_ints(np.arange(n))
    lanes = workers // max(1, half, kind.gang(start))  # the two chains of a pair follow each other on one worker
    return Schedule(problem, Order("symmetric_shift", (kind,), ALL_GUARANTEES), Placement(workers, max(1, lanes), (start,), (n,)))


def _first_q_tiles(problem: Problem) -> NDArray[np.int64]:
    """First Q tile of each chain, if every chain keeps all Q tiles from there on."""
    first = problem.q_tiles - problem.chain_lengths
    from_first_on = np.arange(problem.q_tiles)[:, None] >= first
    if not np.array_equal(problem.kept, from_first_on) or np.any(np.diff(first) < 0):
        raise ScheduleError(f"symmetric_shift serves causal masks only (each chain up to the last Q tile); got {problem.mask}")
    return first
