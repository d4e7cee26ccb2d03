"""The chunk model: a unit is a block of work. It knows no hand-overs inside of a unit, so it is kinder than the tile model."""

from __future__ import annotations

from ...scheduling.ranks.units import SharedSchedule, Unit
from .machines import Cluster


class ChunkModel:
    """Runs units in their global sequence.

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
