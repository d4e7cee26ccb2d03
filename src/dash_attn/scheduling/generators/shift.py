"""DASH's shifts: chains start at different Q tiles and walk cyclically, so that no two meet.

On full masks, KV tiles are cut into blocks. Chain i of a block starts `i * spacing` Q tiles in; turns go by block, then by step, so
consecutive turns are `spacing` steps apart. The chains of a block wait for each other in a circle: a gang.
"""

import numpy as np
from numpy.typing import NDArray

from ...errors import ScheduleError
from ..order import ALL_GUARANTEES, BATCH_INVARIANT, RUN_TO_RUN, HeadOrder, Order, frozen_ints, turn_within
from ..problem import Problem, whole_number
from ..schedule import HAND_OVER, Placement, Schedule


def shift(problem: Problem, workers: int) -> Schedule:
    """Blocks as large as the workers allow, as in the paper: the blocks, and so the bits, depend on the number of workers."""
    workers = whole_number("workers", workers)
    largest = min(problem.kv_tiles, problem.q_tiles, workers)
    return _build(problem, workers, "shift", largest, (RUN_TO_RUN, BATCH_INVARIANT))


LARGEST_BLOCK = 16  # chains of a block of shift_blocks, and so SMs it needs at once: eight blocks leave four SMs of an H200 idle
SINGLE_CHAINS = 3  # Q tiles up to which blocks are single chains: of so few, causal masks may keep every tile, and they need no gang


def largest_block(q_tiles: int) -> int:
    """Chains of a block of shift_blocks: two Q tiles each. (Packed batches, which are planned on the device, use the same rule.)"""
    return 1 if q_tiles <= SINGLE_CHAINS else min(LARGEST_BLOCK, (q_tiles + 1) // 2)


def shift_blocks(problem: Problem, workers: int) -> Schedule:
    """Blocks of at most 16 chains, two steps apart (of an odd number of Q tiles one step, once): a function of the problem alone."""
    return _build(problem, workers, "shift_blocks", largest_block(problem.q_tiles), ALL_GUARANTEES)


def _build(problem: Problem, workers: int, name: str, largest: int, guarantees: tuple[str, ...]) -> Schedule:
    if not problem.kept.all():
        raise ScheduleError(f"{name} serves full masks only (every tile kept); got {problem.mask}. Use alternating or weave.")
    kv_tiles, q_tiles = problem.kv_tiles, problem.q_tiles
    blocks = -(-kv_tiles // min(largest, kv_tiles))
    kv = np.arange(kv_tiles)
    block = kv * blocks // kv_tiles  # blocks of equal size, give or take one
    place = kv - np.searchsorted(block, block, side="left")
    # Far enough apart for a hand-over, but no farther: chains that follow each other closely share Q tiles in the cache.
    widest = int(np.bincount(block).max())
    spacing = HAND_OVER if (widest - 1) * HAND_OVER < q_tiles else 1
    step = np.tile(np.arange(q_tiles), kv_tiles)
    chain = np.repeat(kv, q_tiles)
    q_tile = (place[chain] * spacing + step) % q_tiles
    kind = HeadOrder.build(chain, q_tile, turn_within(q_tile, block[chain], step), block * q_tiles)
    sizes = tuple(np.bincount(block).tolist())
    return Schedule.build(problem, Order(name, (kind,), guarantees), (kv,), workers, sizes)


def symmetric_shift(problem: Problem, workers: int) -> Schedule:
    """For causal masks: KV tile i and its mirror n-1-i run one after the other on one worker.

    The chains of the first half walk the rectangle of Q tiles they all share cyclically, each from its own offset, then
    their own part of the triangle upward; the mirror chains walk down from the last Q tile. On square problems all
    workers of a head touch different Q tiles in every step. An odd tile count leaves a middle chain of its own.
    """
    first_q = _first_q_tiles(problem)
    n, q_tiles = problem.kv_tiles, problem.q_tiles
    half = n // 2
    walks = [np.arange(q_tiles - 1, first - 1, -1) for first in first_q]  # down: those of the second half, and the middle one
    first_step = np.zeros(n, dtype=np.int64)
    shared = first_q[half - 1] if half else 0  # the rectangle: Q tiles every chain of the first half visits
    for i in range(half):
        offset = first_q[i] - first_q[0]
        rectangle = shared + (np.arange(q_tiles - shared) + offset) % max(1, q_tiles - shared)
        walks[i] = np.concatenate([rectangle, np.arange(first_q[i], shared)])
        first_step[n - 1 - i] = len(walks[i])
    chain = np.repeat(np.arange(n), [len(w) for w in walks])
    q_tile = np.concatenate(walks)
    position = np.arange(len(chain)) - np.searchsorted(chain, chain, side="left")
    turn = turn_within(q_tile, first_step[chain] + position, chain)
    kind = HeadOrder.build(chain, q_tile, turn, first_step)
    workers = whole_number("workers", workers)
    start = frozen_ints(np.arange(n))
    lanes = workers // max(1, half, kind.gang(start))  # the two chains of a pair follow each other on one worker
    return Schedule(problem, Order("symmetric_shift", (kind,), ALL_GUARANTEES), Placement(workers, max(1, lanes), (start,), (n,)))


def _first_q_tiles(problem: Problem) -> NDArray[np.int64]:
    """First Q tile of each chain, if every chain keeps all Q tiles from there on."""
    first = problem.q_tiles - problem.chain_lengths
    from_first_on = np.arange(problem.q_tiles)[:, None] >= first
    if not np.array_equal(problem.kept, from_first_on) or np.any(np.diff(first) < 0):
        raise ScheduleError(f"symmetric_shift serves causal masks only (each chain up to the last Q tile); got {problem.mask}")
    return first
