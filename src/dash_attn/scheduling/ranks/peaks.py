"""How many states a rank has at once, at most."""

from __future__ import annotations

from collections.abc import Iterable

from .units import SharedSchedule


def most_states(shared: SharedSchedule) -> list[int]:
    """Of each rank, in KV tiles: states are there from the unit before, wherever that runs, until their own unit has run."""
    events: list[list[tuple[int, int]]] = [[] for _ in range(shared.sharding.ranks)]
    for unit in shared.units:
        tiles = shared.state_tiles(unit)
        since = unit.number if unit.before is None else unit.before + 1
        events[unit.rank] += [(since, tiles), (unit.number + 1, -tiles)]
    return [highest(each) for each in events]


def highest(events: Iterable[tuple[int, int]]) -> int:
    """The highest level, if each event (when, by how much) changes it. At one moment, what goes goes first."""
    level = found = 0
    for _, change in sorted(events):
        level += change
        found = max(found, level)
    return found
