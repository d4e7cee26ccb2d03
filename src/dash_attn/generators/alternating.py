"""The causal schedule that holds on real hardware: even heads walk up, odd heads walk down.

Even heads rank the diagonal owner first and start the last KV tile first; odd heads, the mirror image in time, rank
and start the first KV tile first. Chains of a head stay tile_kv / tile_q steps apart in both, workers stay balanced
over each pair of heads, and every chain waits only for earlier starts, so it cannot hang on any number of workers.

A hand-over takes about two steps. Where tiles are so shaped that neighbours would follow closer, the KV tiles are
dealt into classes (even tiles, then odd tiles): neighbours within a class are far enough apart. Heads go in rounds:
those of a round start a class before any of them starts the next.
"""

from __future__ import annotations

import numpy as np

from ..order import HeadOrder, Order, rank_within
from ..problem import Problem
from ..schedule import Schedule
from ._walks import HAND_OVER, downward, upward


def alternating(problem: Problem, workers: int) -> Schedule:
    classes = min(problem.kv_tiles, max(1, -(-HAND_OVER * problem.tile_q // problem.tile_kv)))
    kv = np.arange(problem.kv_tiles)
    by_class = [kv[kv % classes == c] for c in range(classes)]
    delay = (kv % classes) * problem.q_tiles  # a class starts when the one before has ended
    chain, q_tile = upward(problem)
    up = HeadOrder.build(chain, q_tile, rank_within(q_tile, chain % classes, -chain), delay)
    chain, q_tile = downward(problem)
    end_together = problem.chain_lengths.max() - problem.chain_lengths
    down = HeadOrder.build(chain, q_tile, rank_within(q_tile, chain % classes, chain), delay + end_together, last_member_first=True)
    starts = np.concatenate([c[::-1] for c in by_class]), np.concatenate(by_class)
    return Schedule.build(problem, Order("alternating", (up, down)), starts, workers, tuple(map(len, by_class)), in_rounds=True)
