"""The order from the problem alone, so that every machine gives the same bits; only the placement sees the machine."""

from __future__ import annotations

import numpy as np

from ...masks import EMPTY, Causal, Window
from ..problem import Problem
from ..schedule import Schedule
from .alternating import alternating
from .shift import shift_blocks
from .weave import weave

FEW_KV_TILES = 16  # a circle moves at the pace of its slowest start, which short chains do not make up for (H200, head dims 64 and 128)


def auto(problem: Problem, workers: int) -> Schedule:
    if problem.kept.all():
        return (alternating if problem.kv_tiles <= FEW_KV_TILES else shift_blocks)(problem, workers)
    if _is_window_on_the_past(problem) or _keeps_causal_tiles(problem):
        return alternating(problem, workers)
    return weave(problem, workers)


def _is_window_on_the_past(problem: Problem) -> bool:
    """Neighbours of a band that ends on the right follow each other as on a causal mask. (Packed batches, which are planned
    on the device, know this order and no other for windows.)"""
    return isinstance(problem.mask, Window) and problem.mask.right >= 0


def _keeps_causal_tiles(problem: Problem) -> bool:
    """Also true for a window wider than the sequence, or a single document."""
    causal = Causal().tile_map(problem.q_len, problem.kv_len, problem.tile_q, problem.tile_kv)
    return bool(np.array_equal(problem.kept, causal != EMPTY))
