"""Two models of a unit. Both run the units of all ranks in their global sequence."""

from __future__ import annotations

import math
from heapq import heapreplace

from ...scheduling.engine import Chain, Reduces
from ...scheduling.order import members
from ...scheduling.ranks.units import SharedSchedule, Unit
from .machines import Cluster


class ChunkModel:
    """A unit is a block of work. This knows no hand-overs inside of a unit, so it is kinder than the tile model.

    launch: a unit takes its startup, and its tasks' computes spread over the workers that its chains fill.
    overlap: the same, but what it leaves idle the next unit takes: a rank is busy for the computes spread over all workers.
    """

    def __init__(self, shared: SharedSchedule, cluster: Cluster, overlap: bool) -> None:
        self.shared, self.machine, self.workers, self.overlap = shared, cluster.machine, cluster.workers, overlap
        self.free, self.last_end = [0.0] * shared.sharding.ranks, [0.0] * shared.sharding.ranks

    def run(self, unit: Unit, ready: float) -> tuple[float, float]:
        """Start and end of a unit whose states are there at `ready`."""
        start = max(self.free[unit.rank], ready)
        if unit.leg is None:
            return self._ending(unit, ready if self.overlap else start)
        work = self.shared.tasks_of(unit) * self.machine.compute
        filled = min(self.workers, len(unit.heads) * len(self.shared.leg_of(unit).kv_tiles))
        # Overlapped units take turns at dQ tiles, so that none ends before the one that started before it.
        end = max(start + self.machine.startup + work / filled, self.last_end[unit.rank])
        self.last_end[unit.rank] = end
        self.free[unit.rank] = start + work / self.workers if self.overlap else end
        return start, end

    def _ending(self, unit: Unit, start: float) -> tuple[float, float]:
        """Overlapped, it runs on the side: nothing but other endings waits for it."""
        adds = self.shared.state_tiles(unit) * self.shared.problem.adds
        end = start + adds * self.machine.reduce / self.workers
        if not self.overlap:
            self.free[unit.rank] = end
        return start, end


class TileModel:
    """Every task of every unit, with the equations of the simulator (scheduling/engine.py). Times are ticks of the machine.

    A leg is a chain with fewer tasks, and the turns of a dQ tile go on from the legs before. The sequence of units puts each behind those
    that it waits for, and so do the chains of a unit: each chain runs to its end when it starts, else the sequence is wrong.
    """

    def __init__(self, shared: SharedSchedule, cluster: Cluster, overlap: bool) -> None:
        self.shared, self.overlap, self.workers = shared, overlap, cluster.workers
        self.costs, self.ticks = cluster.machine.costs, cluster.machine.ticks_per_unit
        problem = shared.problem
        self.reduces = Reduces(problem.batch * problem.heads * problem.group * problem.q_tiles, self.costs)
        ranks = shared.sharding.ranks
        self.free = [[0] * cluster.workers for _ in range(ranks)]  # heaps: when each worker of a rank is
        self.floor = [0] * ranks  # nothing of a rank starts earlier
        self.legs: dict[tuple[int, int, int], tuple[list[int], list[int]]] = {}

    def run(self, unit: Unit, ready: float) -> tuple[float, float]:
        """Start and end of a unit whose states are there at `ready`."""
        earliest = math.ceil(ready * self.ticks)
        on_the_side = unit.leg is None and self.overlap  # nothing but other endings waits for it
        if not on_the_side:
            earliest = max(self.floor[unit.rank], earliest)
        start, end = self._ending(unit, earliest) if unit.leg is None else self._leg(unit, earliest)
        if not on_the_side:  # overlapped units still start in sequence; launched ones wait until the one before has ended
            self.floor[unit.rank] = earliest if self.overlap else end
        return start / self.ticks, end / self.ticks

    def _ending(self, unit: Unit, earliest: int) -> tuple[int, int]:
        """Where a group has parts, adds of dK and dV, by all workers at once."""
        adds = self.shared.state_tiles(unit) * self.shared.problem.adds
        return earliest, earliest + -(-adds * self.costs.reduce // self.workers)

    def _leg(self, unit: Unit, earliest: int) -> tuple[int, int]:
        free = self.free[unit.rank]
        if not self.overlap:
            free[:] = [earliest] * self.workers
        started, ended = [], []
        for kv_tile in self.shared.leg_of(unit).kv_tiles:
            keys, turns = self._tasks(unit, kv_tile)
            for head in unit.heads:
                chain = Chain(0, max(free[0], earliest), self._base(unit, head), keys, turns)
                assert [*self.reduces.run(chain)] == [chain], "a unit comes behind those that it waits for, and so do its chains"
                started.append(chain.start)
                ended.append(chain.end)
                heapreplace(free, chain.end)
        return min(started), max(ended)

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
