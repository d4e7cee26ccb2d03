"""FlashAttention-3's first deterministic mode: every chain walks up, turns follow the KV tiles."""

from __future__ import annotations

import numpy as np

from ..order import ALL_GUARANTEES, HeadOrder, Order, turn_within
from ..problem import Problem
from ..schedule import Schedule
from ._walks import upward


def ascending(problem: Problem, workers: int) -> Schedule:
    chain, q_tile = upward(problem)
    no_delay = np.zeros(problem.kv_tiles, dtype=np.int64)
    kind = HeadOrder.build(chain, q_tile, turn_within(q_tile, chain), no_delay)
    return Schedule.build(problem, Order("ascending", (kind,), ALL_GUARANTEES), (np.arange(problem.kv_tiles),), workers)
