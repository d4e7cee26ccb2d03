"""Shortest processing time first, the order FlashAttention-3 uses for causal masks today.

Chains start from the shortest to the longest (causal: from the last KV tile to the first) and have their turns in that order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..order import ALL_GUARANTEES, HeadOrder, Order, turn_within
from ..problem import Problem
from ..schedule import Schedule
from ._walks import upward


def spt(problem: Problem, workers: int) -> Schedule:
    start = shortest_first(problem)
    place = np.argsort(start)
    chain, q_tile = upward(problem)
    kind = HeadOrder.build(chain, q_tile, turn_within(q_tile, place[chain]), np.zeros(problem.kv_tiles, dtype=np.int64))
    return Schedule.build(problem, Order("spt", (kind,), ALL_GUARANTEES), (start,), workers)


def shortest_first(problem: Problem) -> NDArray[np.int64]:
    """KV tiles by chain length, the later tile first where lengths are equal."""
    return np.asarray(np.lexsort((-np.arange(problem.kv_tiles), problem.chain_lengths)), dtype=np.int64)
