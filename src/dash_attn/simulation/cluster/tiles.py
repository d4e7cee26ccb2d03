"""The tile model: every task of every unit, with the equations of the simulator (scheduling/engine.py).

A leg is a chain with fewer tasks, and the turns of a dQ tile go on from the legs before. The sequence of units puts each behind those
that it waits for, and so do the chains of a unit: each chain runs to its end when it starts, else the sequence is wrong.
"""

from __future__ import annotations

import math
from heapq import heapreplace

from ...scheduling.engine import Chain, advance, chain_end
from ...scheduling.order import members
from ...scheduling.ranks.units import SharedSchedule, Unit
from ..simulate import Machine
from .machines import Cluster


class TileModel:
    """Runs units in their global sequence. Times are ticks of the machine."""

    def __init__(self, shared: SharedSchedule, cluster: Cluster, overlap: bool) -> None:
        self.shared, self.overlap, self.workers = shared, overlap, cluster.workers
        self.machine: Machine = cluster.machine
        problem = shared.problem
        self.costs = cluster.machine.costs
        self.landed = [0] * (problem.batch * problem.heads * problem.group * problem.q_tiles)
        self.available = self.landed.copy()
        ranks = shared.sharding.ranks
        self.free = [[0] * cluster.workers for _ in range(ranks)]  # heaps: when each worker of a rank is
        self.floor = [0] * ranks  # nothing of a rank starts earlier
        self.legs: dict[tuple[int, int, int], tuple[list[int], list[int]]] = {}

    @property
    def ticks(self) -> int:
        return self.machine.ticks_per_unit

    def run(self, unit: Unit, ready: float) -> tuple[float, float]:
        """Start and end of a unit whose states are there at `ready`."""
        ready_ticks, rank = math.ceil(ready * self.ticks), unit.rank
        if unit.leg is None and self.overlap:  # on the side: nothing but other endings waits for it
            start, end = self._ending(unit, ready_ticks)
            return start / self.ticks, end / self.ticks
        earliest = max(self.floor[rank], ready_ticks)
        start, end = self._ending(unit, earliest) if unit.leg is None else self._leg(unit, earliest)
        # Overlapped units still start in sequence; launched ones wait until the one before has ended.
        self.floor[rank] = earliest if self.overlap else end
        return start / self.ticks, end / self.ticks

    def _ending(self, unit: Unit, earliest: int) -> tuple[int, int]:
        """Where a group has parts, adds of dK and dV, by all workers at once."""
        adds = self.shared.state_tiles(unit) * self.shared.problem.adds
        return earliest, earliest + -(-adds * self.costs.reduce // self.workers)

    def _leg(self, unit: Unit, earliest: int) -> tuple[int, int]:
        leg, heads = self.shared.leg_of(unit), unit.heads
        free = self.free[unit.rank]
        if not self.overlap:
            free[:] = [earliest] * self.workers
        started, ended = [], []
        for kv_tile in leg.kv_tiles:
            keys, turns = self._tasks(unit, kv_tile)
            for head in heads:
                start = max(free[0], earliest)
                end = self._chain(start, self._base(unit, head), keys, turns)
                heapreplace(free, end)
                started.append(start)
                ended.append(end)
        return min(started), max(ended)

    def _chain(self, start: int, base: int, keys: list[int], turns: list[int]) -> int:
        chain = Chain(0, start, base, keys, turns)
        advance(chain, self.costs, True, self.landed, self.available, {}, [])
        assert chain.ended, "a unit comes behind those that it waits for, and so do its chains"
        return chain_end(chain, self.costs)

    def _tasks(self, unit: Unit, kv_tile: int) -> tuple[list[int], list[int]]:
        """Q tiles and turns of a leg of a chain."""
        assert unit.leg is not None
        place = (unit.kind, kv_tile, unit.leg)
        if place not in self.legs:
            order, steps = self.shared.schedule.order.kinds[unit.kind], self.shared.trips[unit.kind].steps(kv_tile, unit.leg)
            self.legs[place] = order.walk(kv_tile)[steps].tolist(), order.turns(kv_tile)[steps].tolist()
        return self.legs[place]

    def _base(self, unit: Unit, head: tuple[int, int]) -> int:
        """The first dQ tile of the query head that a unit walks for."""
        problem, (sequence, part) = self.shared.problem, head
        there = problem.members(part)
        member = members(len(there), self.shared.schedule.order.kinds[unit.kind].last_member_first)[unit.member]
        return (sequence * problem.heads * problem.group + there.start + int(member)) * problem.q_tiles
