"""Every schedule under its own name. To add one: write a file, list it here, record a golden file (CONTRIBUTING.md)."""

from collections.abc import Callable
from typing import Literal, get_args

import numpy as np

from ...errors import did_you_mean
from ...masks import EMPTY, Causal, Window
from ..problem import Problem
from ..schedule import GENERATED_BY, Schedule
from ..validate import TooFewWorkers
from .alternating import alternating
from .arrival import arrival
from .one_kind import ascending, descending, spt
from .shift import largest_block, shift, shift_blocks, symmetric_shift
from .weave import weave

Generator = Callable[[Problem, int], Schedule]
FEW_KV_TILES = 8  # too few for more than one circle, which is slower to start than chains that follow each other (H200, head dim 64)


def auto(problem: Problem, workers: int) -> Schedule:
    """The order from the problem alone, so that every machine gives the same bits; only the placement sees the machine."""
    return choice_of_auto(problem)(problem, workers)


def choice_of_auto(problem: Problem) -> Generator:
    if problem.kept.all():  # as one circle, or as several of many chains
        in_circles = problem.kv_tiles > FEW_KV_TILES or 1 < problem.kv_tiles <= largest_block(problem.q_tiles)
        return shift_blocks if in_circles else alternating
    # Neighbours of a band that ends on the right follow each other as on a causal mask. (Packed batches, which are planned
    # on the device, know this order and no other for windows.)
    is_window_on_the_past = isinstance(problem.mask, Window) and problem.mask.right >= 0
    return alternating if is_window_on_the_past or _keeps_causal_tiles(problem) else weave


def _keeps_causal_tiles(problem: Problem) -> bool:
    """Also true for a window wider than the sequence, or a single document."""
    causal = Causal().tile_map(problem.q_len, problem.kv_len, problem.tile_q, problem.tile_kv)
    return bool(np.array_equal(problem.kept, causal != EMPTY))


_ALL = (ascending, descending, spt, shift, shift_blocks, symmetric_shift, alternating, arrival, weave)
GENERATORS: dict[str, Generator] = {generator.__name__: generator for generator in _ALL}
ScheduleName = Literal[
    "auto", "ascending", "descending", "spt", "shift", "shift_blocks", "symmetric_shift", "alternating", "arrival", "weave"
]
# A sentence for each, for the page and docs/explore.md.
IDEAS: dict[str, str] = {
    "auto": "Picks one of the others by the mask and the number of tiles.",
    "ascending": "Every chain walks up, and turns follow the KV tiles: FlashAttention-3's first deterministic mode.",
    "descending": "Every chain walks down from the last Q tile, and turns follow the KV tiles (DASH).",
    "spt": "The shortest chains start first and get the first turns, as in FlashAttention-3.",
    "shift": "Chain i of a block starts at its own Q tile and wraps around (DASH). For full masks; blocks depend on the number of workers.",
    "shift_blocks": "Like shift, in blocks of at most 16 chains, whatever the number of workers. For full masks.",
    "symmetric_shift": "KV tile i runs with its mirror image, and all such pairs are equally long (DASH). For causal masks.",
    "alternating": "Even heads walk up; odd heads do the same in reverse time.",
    "arrival": "Turns are fixed in the order in which a simulated unordered run adds.",
    "weave": "For any mask: the longest chains start first, and each claims the Q tile that is free the soonest.",
}
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
        raise ValueError(f"unknown schedule {name!r}; choose from {', '.join(SCHEDULES)}{did_you_mean(name, SCHEDULES)}")
    return GENERATORS[name](problem, workers)


__all__ = ["GENERATORS", "SCHEDULES", "Generator", "ScheduleName", "auto", "generate", *GENERATORS]
