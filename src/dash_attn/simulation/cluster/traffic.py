"""What ranks send each other, in bytes."""

from __future__ import annotations

from ...scheduling.problem import Problem
from ...scheduling.ranks.sharding import Sharding
from ...scheduling.ranks.units import SharedSchedule
from .machines import Widths

PerRank = tuple[int, ...]


def gather_bytes(problem: Problem, sharding: Sharding, widths: Widths) -> PerRank:
    """K and V of all heads: each rank sends its own rows to every other one. The forward needs them, and the backward again."""
    heads, others = problem.heads * problem.batch, sharding.ranks - 1
    return tuple(heads * others * widths.keys(len(sharding.rows_of(rank))) for rank in range(sharding.ranks))


def state_bytes(shared: SharedSchedule, widths: Widths) -> PerRank:
    """States that hop from leg to leg, and from the last leg to the rank of the keys."""
    sent = [0] * shared.sharding.ranks
    for unit in shared.units:
        if shared.hops(unit):
            sent[unit.rank] += widths.states(shared.problem, shared.state_tiles(unit))
    return tuple(sent)


def hops_by_rank(shared: SharedSchedule) -> PerRank:
    """How many times each rank sends the states of a unit."""
    sent = [0] * shared.sharding.ranks
    for unit in shared.units:
        sent[unit.rank] += shared.hops(unit)
    return tuple(sent)
