"""The causal schedule that holds on real hardware: even heads walk up, odd heads walk down.

In even heads the diagonal owner has the first turn and the last KV tile starts first; in odd heads, the mirror image in time,
the first KV tile has the first turn and starts first. Chains of a head stay tile_kv / tile_q steps apart in both, workers stay balanced
over each pair of heads, and every chain waits only for earlier starts, so it cannot hang on any number of workers.

A hand-over takes about two steps. Where tiles are so shaped that neighbours would follow closer, the KV tiles are
dealt into classes (even tiles, then odd tiles): neighbours within a class are far enough apart. Heads go in rounds:
those of a round start a class before any of them starts the next. Two cases need no classes: with few KV tiles the
delays do not add up to much, and chains of many query heads drift apart from one to the next.
On causal masks few are many: the second class ends a walk later than the first, which a few heads alone do not hide.
"""

import numpy as np

from ..order import ALL_GUARANTEES, HeadOrder, Order, turn_within
from ..problem import Problem
from ..schedule import HAND_OVER, Schedule
from .one_kind import downward, upward

ONE_CLASS = 8  # KV tiles up to which there are no classes (H200, head dim 64) ...
ONE_CAUSAL_CLASS = 48  # ... on causal masks (H200, head dims 64 and 256) ...
MANY_MEMBERS = 4  # ... and query heads of a chain from which there are none


def alternating(problem: Problem, workers: int) -> Schedule:
    classes = _classes(problem)
    kv = np.arange(problem.kv_tiles)
    by_class = [kv[kv % classes == c] for c in range(classes)]
    delay = (kv % classes) * problem.q_tiles  # a class starts when the one before has ended
    chain, q_tile = upward(problem)
    up = HeadOrder.build(chain, q_tile, turn_within(q_tile, chain % classes, -chain), delay)
    chain, q_tile = downward(problem)
    end_together = problem.chain_lengths.max() - problem.chain_lengths
    down = HeadOrder.build(chain, q_tile, turn_within(q_tile, chain % classes, chain), delay + end_together, last_member_first=True)
    starts = np.concatenate([c[::-1] for c in by_class]), np.concatenate(by_class)
    return Schedule.build(
        problem, Order("alternating", (up, down), ALL_GUARANTEES), starts, workers, tuple(map(len, by_class)), in_rounds=True
    )


def _classes(problem: Problem) -> int:
    causal = problem.kept[-1, 0] and not problem.kept[0, -1]  # the last queries see the first keys, the first not the last
    if problem.kv_tiles <= (ONE_CAUSAL_CLASS if causal else ONE_CLASS) or problem.most_members >= MANY_MEMBERS:
        return 1
    apart = max(1, -(-HAND_OVER * problem.tile_q // problem.tile_kv))  # KV tiles that are a hand-over apart
    return min(problem.kv_tiles, apart)
