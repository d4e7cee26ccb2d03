"""What devices send each other, in bytes."""

from __future__ import annotations

from ...scheduling.devices.sharding import Sharding
from ...scheduling.devices.units import SharedSchedule
from ...scheduling.problem import Problem
from .machines import Widths

PerDevice = tuple[int, ...]


def gather_bytes(problem: Problem, sharding: Sharding, widths: Widths) -> PerDevice:
    """K and V of all heads: each device sends its own rows to every other one. The forward needs them, and the backward again."""
    heads, others = problem.heads * problem.batch, sharding.devices - 1
    return tuple(heads * others * widths.keys(len(sharding.rows_of(device))) for device in range(sharding.devices))


def state_bytes(shared: SharedSchedule, widths: Widths) -> PerDevice:
    """States that hop from leg to leg, and from the last leg to the device of the keys."""
    sent = [0] * shared.sharding.devices
    for unit in shared.units:
        if shared.hops(unit):
            sent[unit.device] += widths.states(shared.problem, shared.state_tiles(unit))
    return tuple(sent)


def hops_by_device(shared: SharedSchedule) -> PerDevice:
    """How many times each device sends the states of a unit."""
    sent = [0] * shared.sharding.devices
    for unit in shared.units:
        sent[unit.device] += shared.hops(unit)
    return tuple(sent)
