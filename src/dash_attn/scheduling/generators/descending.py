"""DASH's descending iteration: every chain walks down from the last Q tile, turns follow the KV tiles.

On a causal mask the chains that start together end one after another, shortest first, so the next head's long
chains start on the workers that are free first and the load evens out over each pair of heads.
"""

from __future__ import annotations

import numpy as np

from ..problem import Problem
from ..schedule import Schedule
from ._walks import downward, turns_as_they_start


def descending(problem: Problem, workers: int) -> Schedule:
    return turns_as_they_start("descending", problem, workers, downward(problem), np.arange(problem.kv_tiles))
