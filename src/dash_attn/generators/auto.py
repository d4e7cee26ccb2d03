"""The order from the problem alone, so that every machine gives the same bits; only the placement sees the machine."""

from __future__ import annotations

import numpy as np

from ..masks import EMPTY, Causal
from ..problem import Problem
from ..schedule import Schedule
from .alternating import alternating
from .shift import shift_blocks
from .weave import weave


def auto(problem: Problem, workers: int) -> Schedule:
    if problem.kept.all():
        return shift_blocks(problem, workers)
    if _keeps_causal_tiles(problem):
        return alternating(problem, workers)
    return weave(problem, workers)


def _keeps_causal_tiles(problem: Problem) -> bool:
    """Also true for a window wider than the sequence, or a single document."""
    causal = Causal().tile_map(problem.q_len, problem.kv_len, problem.tile_q, problem.tile_kv)
    return bool(np.array_equal(problem.kept, causal != EMPTY))
