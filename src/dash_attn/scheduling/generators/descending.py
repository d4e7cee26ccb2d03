"""DASH's descending iteration: every chain walks down from the last Q tile, turns follow the KV tiles.

On a causal mask the chains that start together end one after another, shortest first, so the next head's long
chains start on the workers that are free first and the load evens out over each pair of heads.
"""

from __future__ import annotations

import numpy as np

from ..order import ALL_GUARANTEES, HeadOrder, Order, turn_within
from ..problem import Problem
from ..schedule import Schedule
from ._walks import downward


def descending(problem: Problem, workers: int) -> Schedule:
    chain, q_tile = downward(problem)
    no_delay = np.zeros(problem.kv_tiles, dtype=np.int64)
    kind = HeadOrder.build(chain, q_tile, turn_within(q_tile, chain), no_delay)
    return Schedule.build(problem, Order("descending", (kind,), ALL_GUARANTEES), (np.arange(problem.kv_tiles),), workers)
