"""What it costs hosts that ranks compare each call (`benchmarks.ranks --cost`): every figure is told, on the CPU, too."""

from __future__ import annotations

from unittest.mock import patch

from benchmarks import ranks
from processes import Group

NAMES = {"comparison", "agreement on a call", "its own checks alone", "forward and backward", "without comparison"}


def few(rank: int) -> dict[str, float | None]:
    with patch.multiple(ranks, COMPARISONS=2, CALLS=1, CALL_ROUNDS=1, WARM_UP=1):
        return ranks.costs_of_rank(rank)


GROUP = Group(few, 2)


def test_every_cost_is_told() -> None:
    for found in GROUP.found:
        assert {name for name, microseconds in found.items() if microseconds is not None} == NAMES
