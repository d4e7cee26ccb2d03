"""FlashAttention-3's first deterministic mode: every chain walks up, turns follow the KV tiles."""

from __future__ import annotations

import numpy as np

from ..problem import Problem
from ..schedule import Schedule
from ._walks import turns_as_they_start, upward


def ascending(problem: Problem, workers: int) -> Schedule:
    return turns_as_they_start("ascending", problem, workers, upward(problem), np.arange(problem.kv_tiles))
