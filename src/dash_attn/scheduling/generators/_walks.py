"""Building blocks the generators share: the kept tasks of a head, walked up or down, and turns in the order in which chains start."""

from __future__ import annotations

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
