"""The causal schedule that holds on real hardware: even heads walk up, odd heads walk down.

Even heads rank the diagonal owner first and start the last KV tile first; odd heads rank and start the first KV tile
first. Chains of a head stay tile_kv / tile_q steps apart in both, workers stay balanced over each pair of heads, and
every chain waits only for earlier starts, so it cannot hang on any number of workers.
"""

from __future__ import annotations

import numpy as np

from ..order import HeadOrder, Order, rank_within
from ..problem import Problem
from ..schedule import Schedule
from ._walks import upward


def alternating(problem: Problem, workers: int) -> Schedule:
    kv_tiles = np.arange(problem.kv_tiles)
    chain, q_tile = upward(problem)
    up = HeadOrder.build(chain, q_tile, rank_within(q_tile, -chain), np.zeros(problem.kv_tiles))
    order = Order("alternating", (up, up.mirrored()))
    return Schedule.build(problem, order, (kv_tiles[::-1], kv_tiles), workers)
