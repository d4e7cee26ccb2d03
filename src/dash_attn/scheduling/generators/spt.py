"""Shortest processing time first, the order FlashAttention-3 uses for causal masks today.

Chains start from the shortest to the longest (causal: from the last KV tile to the first) and have their turns in that order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..problem import Problem
from ..schedule import Schedule
from ._walks import turns_as_they_start, upward


def spt(problem: Problem, workers: int) -> Schedule:
    return turns_as_they_start("spt", problem, workers, upward(problem), shortest_first(problem))


def shortest_first(problem: Problem) -> NDArray[np.int64]:
    """KV tiles by chain length, the later tile first where lengths are equal."""
    return np.asarray(np.lexsort((-np.arange(problem.kv_tiles), problem.chain_lengths)), dtype=np.int64)
