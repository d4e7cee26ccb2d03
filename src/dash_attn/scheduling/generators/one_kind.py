"""Schedules with one kind of head, whose chains have their turns in the order in which they start, and the walks of other schedules."""

import numpy as np
from numpy.typing import NDArray

from ..order import ALL_GUARANTEES, HeadOrder, Order, turn_within
from ..problem import Problem
from ..schedule import Schedule

Tasks = tuple[NDArray[np.int64], NDArray[np.int64]]


def upward(problem: Problem) -> Tasks:
    """(chain, q_tile) of every kept task, each chain from its first Q tile to its last."""
    chain, q_tile = np.nonzero(problem.kept.T)
    return chain, q_tile


def downward(problem: Problem) -> Tasks:
    """(chain, q_tile) of every kept task, each chain from its last Q tile to its first."""
    chain, flipped = np.nonzero(problem.kept[::-1].T)
    return chain, problem.q_tiles - 1 - flipped


def turns_as_they_start(name: str, problem: Problem, workers: int, tasks: Tasks, start: NDArray[np.int64]) -> Schedule:
    """Heads of one kind: chains start in this order, and have their turns in it."""
    chain, q_tile = tasks
    no_delay = np.zeros(problem.kv_tiles, dtype=np.int64)
    kind = HeadOrder.build(chain, q_tile, turn_within(q_tile, np.argsort(start)[chain]), no_delay)
    return Schedule.build(problem, Order(name, (kind,), ALL_GUARANTEES), (start,), workers)


def ascending(problem: Problem, workers: int) -> Schedule:
    """FlashAttention-3's first deterministic mode: every chain walks up, turns follow the KV tiles."""
    return turns_as_they_start("ascending", problem, workers, upward(problem), np.arange(problem.kv_tiles))


def descending(problem: Problem, workers: int) -> Schedule:
    """DASH's descending iteration: every chain walks down from the last Q tile, turns follow the KV tiles.

    On a causal mask the chains that start together end one after another, shortest first, so the next head's long
    chains start on the workers that are free first and the load evens out over each pair of heads.
    """
    return turns_as_they_start("descending", problem, workers, downward(problem), np.arange(problem.kv_tiles))


def spt(problem: Problem, workers: int) -> Schedule:
    """Shortest processing time first, the order FlashAttention-3 uses for causal masks today: chains start, and have their turns, from
    the shortest to the longest (causal: from the last KV tile to the first)."""
    return turns_as_they_start("spt", problem, workers, upward(problem), shortest_first(problem))


def shortest_first(problem: Problem) -> NDArray[np.int64]:
    """KV tiles by chain length, the later tile first where lengths are equal."""
    return np.asarray(np.lexsort((-np.arange(problem.kv_tiles), problem.chain_lengths)), dtype=np.int64)
