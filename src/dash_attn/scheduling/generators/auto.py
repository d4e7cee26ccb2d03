"""The order from the problem alone, so that every machine gives the same bits; only the placement sees the machine."""

from __future__ import annotations

import numpy as np

from ...masks import EMPTY, Causal, Window
from ..problem import Problem
from ..schedule import Schedule
from .alternating import alternating
from .shift import largest_block, shift_blocks
from .weave import weave

FEW_KV_TILES = 8  # too few for more than one circle, which is slower to start than chains that follow each other (H200, head dim 64)


def auto(problem: Problem, workers: int) -> Schedule:
    if problem.kept.all():
        return (shift_blocks if goes_in_circles(problem.q_tiles, problem.kv_tiles) else alternating)(problem, workers)
    if _is_window_on_the_past(problem) or _keeps_causal_tiles(problem):
        return alternating(problem, workers)
    return weave(problem, workers)


def goes_in_circles(q_tiles: int, kv_tiles: int) -> bool:
    """Where every tile is kept: as one circle, or as several of many chains."""
    return kv_tiles > FEW_KV_TILES or 1 < kv_tiles <= largest_block(q_tiles)


def _is_window_on_the_past(problem: Problem) -> bool:
    """Neighbours of a band that ends on the right follow each other as on a causal mask. (Packed batches, which are planned
    on the device, know this order and no other for windows.)"""
    return isinstance(problem.mask, Window) and problem.mask.right >= 0


def _keeps_causal_tiles(problem: Problem) -> bool:
    """Also true for a window wider than the sequence, or a single document."""
    causal = Causal().tile_map(problem.q_len, problem.kv_len, problem.tile_q, problem.tile_kv)
    return bool(np.array_equal(problem.kept, causal != EMPTY))
