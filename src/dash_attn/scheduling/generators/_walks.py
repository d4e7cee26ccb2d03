"""Building blocks the generators share: the kept tasks of a head, walked up or down."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..problem import Problem
from ..schedule import HAND_OVER

__all__ = ["HAND_OVER", "downward", "upward"]
Tasks = tuple[NDArray[np.int64], NDArray[np.int64]]


def upward(problem: Problem) -> Tasks:
    """(chain, q_tile) of every kept task, each chain from its first Q tile to its last."""
    chain, q_tile = np.nonzero(problem.kept.T)
    return chain, q_tile


def downward(problem: Problem) -> Tasks:
    """(chain, q_tile) of every kept task, each chain from its last Q tile to its first."""
    chain, flipped = np.nonzero(problem.kept[::-1].T)
    return chain, problem.q_tiles - 1 - flipped
