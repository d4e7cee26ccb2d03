"""A schedule for any mask: chains claim Q tiles so that they follow each other at a distance.

Chains are taken from the shortest to the longest; each walks its Q tiles in the order in which the chains before it
release them (sorting by release time is optimal for one chain) and turns behind them. Every chain waits only for
earlier starts: no gang, any number of workers.

Where chains differ in length, or would meet too often, they are cut into blocks, longest chains first, so that the
last chains to start are short and workers end together. All heads start a block before any starts the next, so that
blocks of one head rarely meet (with fewer than about eight heads in flight they do, and wait). Under masks with holes, long
chains of even length read most tiles of their head, each at another time, and a cache holds those of few heads: their blocks
are large, so that few heads are in flight. Where a few chains have most tasks (trees), blocks end where chains are much shorter.
Sparse heads follow one another, unless their chains crowd on a few Q tiles: side by side, the cache would hold little of each.
"""

import numpy as np
from numpy.typing import NDArray

from ..order import ALL_GUARANTEES, HeadOrder, Order, turn_within
from ..problem import Problem
from ..schedule import HAND_OVER, Schedule
from .one_kind import shortest_first

BLOCK, BLOCKS = 32, 4  # most chains of a block, least blocks of a head: more balances better, fewer wait less (docs/log.md)
DISTANCES = (HAND_OVER, 1)  # steps between chains on a Q tile: enough for a hand-over, or what the mask has room for
EVEN = 0.7  # mean over longest chain length from which one block balances well enough
WASTE = 0.05  # nominal waiting per task that one block may have
CROWDED = 0.25  # ... beyond which more heads go side by side than the cache holds: chains of one head then start farther apart
DENSE, LARGE_BLOCK = 0.4, 64  # mean chain length over Q tiles from which blocks are large, and their most chains
SMALL_BLOCK, LOPSIDED = 16, 0.5  # least chains of a block that ends by length, and the share of the longest ones from which blocks do
SHORTER = 4  # times, than the longest chain of a block: there it ends


def weave(problem: Problem, workers: int) -> Schedule:
    blocks = _choose_blocks(problem)
    walks, waiting = _walks_of(problem, blocks)
    start = np.concatenate(blocks)
    place = np.argsort(start)
    chain = np.repeat(np.arange(problem.kv_tiles), [len(w) for w in walks])
    q_tile = np.concatenate(walks)
    block_of = np.repeat(np.arange(len(blocks)), [len(block) for block in blocks])[place]
    first_step = block_of * int(problem.chain_lengths.max())
    kind = HeadOrder.build(chain, q_tile, turn_within(q_tile, place[chain]), first_step)
    sizes = tuple(map(len, blocks))
    fillings, only_cached = 2 if _is_dense(problem) else 1, len(blocks) > 1 and waiting <= CROWDED and _has_holes(problem)
    return Schedule.build(problem, Order("weave", (kind,), ALL_GUARANTEES), (start,), workers, sizes, False, fillings, only_cached)


def _choose_blocks(problem: Problem) -> list[NDArray[np.int64]]:
    """KV tiles in start order, cut into blocks: a function of the mask and the tiles alone."""
    ascending = shortest_first(problem)
    if _is_even(problem) and any(_walks(problem, ascending, d)[1] <= WASTE for d in DISTANCES):
        return [ascending]
    if _is_lopsided(problem):
        blocks = _cut_by_length(problem, ascending[::-1])
        if _walks_of(problem, blocks)[1] <= CROWDED:
            return blocks
    most_chains, least_blocks = (LARGE_BLOCK, 1) if _is_dense(problem) else (BLOCK, BLOCKS)
    count = min(problem.kv_tiles, max(least_blocks, -(-problem.kv_tiles // most_chains)))
    return [block[::-1] for block in np.array_split(ascending[::-1], count)]


def _cut_by_length(problem: Problem, descending: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    lengths, cuts = problem.chain_lengths[descending], [0]
    for place, length in enumerate(lengths):
        chains = place - cuts[-1]
        is_shorter = SHORTER * length <= lengths[cuts[-1]] and min(chains, len(lengths) - place) >= SMALL_BLOCK
        if is_shorter or chains == LARGE_BLOCK:
            cuts.append(place)
    return [block[::-1] for block in np.split(descending, cuts[1:])]


def _is_even(problem: Problem) -> bool:
    return bool(problem.chain_lengths.mean() >= EVEN * problem.chain_lengths.max())


def _is_lopsided(problem: Problem) -> bool:
    is_large, lengths = min(problem.q_tiles, problem.kv_tiles) >= LARGE_BLOCK, np.sort(problem.chain_lengths)
    return bool(is_large and lengths[-SMALL_BLOCK:].sum() > LOPSIDED * lengths.sum() and _has_holes(problem))


def _is_dense(problem: Problem) -> bool:
    is_large, mean = min(problem.q_tiles, problem.kv_tiles) > BLOCK, problem.chain_lengths.mean()
    return bool(is_large and _has_holes(problem) and _is_even(problem) and mean >= DENSE * problem.q_tiles)


def _has_holes(problem: Problem) -> bool:
    """Whether a Q tile skips KV tiles between two that it keeps. Otherwise chains walk the same tiles together."""
    kept = problem.kept
    first, behind_last = kept.argmax(1), problem.kv_tiles - kept[:, ::-1].argmax(1)
    return bool((kept.any(1) & (kept.sum(1) < behind_last - first)).any())


def _walks_of(problem: Problem, blocks: list[NDArray[np.int64]]) -> tuple[list[NDArray[np.int64]], float]:
    """Walks of all KV tiles, and the waiting per task in the blocks."""
    walks: list[NDArray[np.int64]] = [np.arange(0)] * problem.kv_tiles
    waiting = 0.0
    for block in blocks:
        found, waits = _walks(problem, block, DISTANCES[0])
        waiting += waits * sum(map(len, found))
        for kv_tile, walk in zip(block, found, strict=True):
            walks[kv_tile] = walk
    return walks, waiting / max(1, sum(map(len, walks)))


def _walks(problem: Problem, block: NDArray[np.int64], distance: int) -> tuple[list[NDArray[np.int64]], float]:
    """Walks of chains that start together, in this order, and the waiting per task they would have."""
    released = np.zeros(problem.q_tiles, dtype=np.int64)
    walks, waiting = [], 0
    for kv_tile in block:
        wanted = np.flatnonzero(problem.kept[:, kv_tile])
        walk = wanted[np.argsort(released[wanted], kind="stable")]
        position = np.arange(len(walk))
        step = np.maximum.accumulate(released[walk] - position) + position
        released[walk] = step + distance
        waiting += int(step[-1]) + 1 - len(walk) if len(walk) else 0
        walks.append(walk)
    return walks, waiting / max(1, sum(map(len, walks)))
