"""The order from the problem alone, so that every machine gives the same bits; only the placement sees the machine."""

from __future__ import annotations

from ..problem import Problem
from ..schedule import Schedule
from .alternating import alternating
from .shift import shift_blocks
from .weave import weave


def auto(problem: Problem, workers: int) -> Schedule:
    if problem.kept.all():
        return shift_blocks(problem, workers)
    if problem.mask.is_causal:
        return alternating(problem, workers)
    return weave(problem, workers)
