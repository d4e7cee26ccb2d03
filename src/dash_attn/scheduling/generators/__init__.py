"""Every schedule under its own name. To add one: write a file, list it here, record a golden file (CONTRIBUTING.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import numpy as np

from ...masks import EMPTY, Causal, Window
from ..problem import Problem
from ..schedule import GENERATED_BY, Schedule
from ..validate import TooFewWorkers
from .alternating import alternating
from .arrival import arrival
from .one_kind import ascending, descending, spt
from .shift import largest_block, shift, shift_blocks
from .symmetric_shift import symmetric_shift
from .weave import weave

FEW_KV_TILES = 8  # too few for more than one circle, which is slower to start than chains that follow each other (H200, head dim 64)


def auto(problem: Problem, workers: int) -> Schedule:
    """The order from the problem alone, so that every machine gives the same bits; only the placement sees the machine."""
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


Generator = Callable[[Problem, int], Schedule]

_ALL = (ascending, descending, spt, shift, shift_blocks, symmetric_shift, alternating, arrival, weave)
GENERATORS: dict[str, Generator] = {generator.__name__: generator for generator in _ALL}
ScheduleName = Literal[
    "auto", "ascending", "descending", "spt", "shift", "shift_blocks", "symmetric_shift", "alternating", "arrival", "weave"
]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
GENERATED_BY.update(GENERATORS)


def generate(name: str, problem: Problem, workers: int) -> Schedule:
    """The schedule called `name` (or `auto`) for a problem on `workers` workers."""
    if name == "auto":
        try:
            return auto(problem, workers)
        except TooFewWorkers as error:  # in one line: details are for those who write a schedule
            raise TooFewWorkers(f"auto (here {error.name})", error.needed, error.workers) from None
    if name not in GENERATORS:
        raise ValueError(f"unknown schedule {name!r}; choose from {', '.join(SCHEDULES)}")
    return GENERATORS[name](problem, workers)


__all__ = ["GENERATORS", "SCHEDULES", "Generator", "ScheduleName", "auto", "generate", *GENERATORS]
