"""A schedule made earlier, for a problem of now: its order on another batch, on other heads or on another machine."""

from __future__ import annotations

from dataclasses import replace

from .problem import Problem
from .schedule import Placement, Schedule, proven_guarantees
from .validate import ScheduleError

DECIDE_TILES = ("mask", "q_len", "kv_len", "tile_q", "tile_kv")  # fields of a Problem: which tiles there are, and which are kept


def fit(schedule: Schedule, problem: Problem, workers: int) -> Schedule:
    """The order and the start orders of `schedule` for `problem` on `workers` workers, proven anew.

    Mask, lengths and tile sizes must be those it was made for. Batch, heads, group and head_offset may be others: walks and
    turns are those of a kind of head. Parts of a group are as many as the schedule says, or else as the rule says. It promises what
    the generator it is named after promises, if that gives this very order for this problem, else that every run has the same bits.
    """
    _check_tiles(schedule.problem, problem)
    problem = _with_parts(problem, schedule.problem.group_parts)
    proven = proven_guarantees(problem, schedule.order, workers)
    order = replace(schedule.order, name=f"{schedule.name} (given)", guarantees=proven)
    return Schedule(problem, order, _placement(schedule, workers))


def _with_parts(problem: Problem, parts: int) -> Problem:
    """Parts that were asked for are kept; 0: none were."""
    if parts > problem.group:
        raise ScheduleError(
            f"the schedule that was given does not fit this call: it deals a group to {parts} parts; the call has groups of"
            f" {problem.group} query heads, so at most as many parts (group_parts 0 leaves them to the rule)"
        )
    return replace(problem, group_parts=parts) if parts else problem


def _placement(schedule: Schedule, workers: int) -> Placement:
    """As it was, but no more heads side by side than leave room for whole gangs."""
    lanes = schedule.placement.lanes
    if schedule.gang > 1:
        lanes = max(1, min(lanes, workers // schedule.gang))
    return replace(schedule.placement, workers=workers, lanes=lanes)


def _check_tiles(made_for: Problem, problem: Problem) -> None:
    """Raise ScheduleError where the two do not have the same tiles, with everything that differs."""
    differing = [name for name in DECIDE_TILES if getattr(made_for, name) != getattr(problem, name)]
    if differing:
        theirs, ours = (", ".join(f"{name} {getattr(which, name)}" for name in differing) for which in (made_for, problem))
        raise ScheduleError(
            f"the schedule that was given does not fit this call: it is for {theirs}; the call has {ours}. Mask, lengths and tile"
            " sizes must be equal (explain(...).backward_tiles tells the tile sizes of a call); batch, heads and workers may differ"
        )
