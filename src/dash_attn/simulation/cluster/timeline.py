"""simulate_ranks(shared, cluster) -> RankTimeline: when each unit of each rank runs, and how busy that keeps them.

There are two models of a unit. Both run the units of all ranks in their global sequence.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from heapq import heapreplace

import numpy as np
from numpy.typing import NDArray

from ...scheduling.engine import Chain, Progress, Reduces
from ...scheduling.order import members
from ...scheduling.ranks.units import SharedSchedule, Unit, highest
from ..machines import Cluster
from ..simulate import simulate
from .peers import efficiency

EXECUTIONS = ("launch", "overlap")
MODELS = ("tiles", "chunks")
MOST_TASKS_OF_TILES = 10_000_000  # half a minute, with the one rank to compare with
Times = NDArray[np.float64]  # microseconds
PerRank = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class RankTimeline:
    """A simulated backward of a shared schedule. Times are by the number of the unit.

    arrival: when the states of a unit are on its rank; 0 where they begin there.
    """

    shared: SharedSchedule
    cluster: Cluster
    execution: str
    model: str
    start: Times
    end: Times
    arrival: Times
    given_one_rank: float | None = None

    @property
    def ranks(self) -> int:
        return self.shared.sharding.ranks

    @property
    def makespan(self) -> float:
        return float(self.end.max(initial=0.0))

    @cached_property
    def one_rank(self) -> float:
        """The same schedule on one rank, by the same model."""
        if self.given_one_rank is not None:
            return self.given_one_rank
        if self.model == "tiles":
            return simulate(self.shared.schedule, self.cluster.machine).makespan
        return self._work

    @property
    def efficiency(self) -> float:
        """How many times as fast as one rank, per rank."""
        return efficiency(self.one_rank, self.ranks, self.makespan)

    @property
    def work_efficiency(self) -> float:
        """Share of all workers' time that is computing."""
        return efficiency(self._work, self.ranks, self.makespan)

    @property
    def _work(self) -> float:
        return self.shared.problem.tasks * self.cluster.machine.compute / self.cluster.workers

    @cached_property
    def gathered(self) -> PerRank:
        """Bytes of K and V that each rank sends, its rows of all heads to each other rank: in the forward, and again in the backward."""
        heads, sharding = self.shared.problem.heads * self.shared.problem.batch, self.shared.sharding
        rows = (len(sharding.rows_of(rank)) for rank in range(self.ranks))
        return tuple(heads * (self.ranks - 1) * self.cluster.widths.keys(own) for own in rows)

    @cached_property
    def states(self) -> PerRank:
        """Bytes of states that each rank sends: from leg to leg, and from the last leg to the rank of the keys."""
        return self._sums(lambda unit: self._state_bytes(unit) if self.shared.hops(unit) else 0)

    @property
    def sent(self) -> PerRank:
        """Bytes that each rank sends in the backward."""
        return tuple(keys + states for keys, states in zip(self.gathered, self.states, strict=True))

    @cached_property
    def hops(self) -> PerRank:
        """How many times each rank sends the states of a unit."""
        return self._sums(self.shared.hops)

    @cached_property
    def waiting(self) -> PerRank:
        """Most units of each rank whose states are there and have to wait. Those in work, and those under way, come on top."""
        return self._most_at_once(lambda unit: 1)

    @cached_property
    def waiting_bytes(self) -> PerRank:
        """The same in bytes."""
        return self._most_at_once(self._state_bytes)

    def _state_bytes(self, unit: Unit) -> int:
        return self.cluster.widths.states(self.shared.problem, self.shared.state_tiles(unit))

    def _sums(self, size_of: Callable[[Unit], int]) -> PerRank:
        return tuple(sum(map(size_of, units)) for units in self.shared.by_rank)

    def _most_at_once(self, size_of: Callable[[Unit], int]) -> PerRank:
        events: list[list[tuple[float, int]]] = [[] for _ in range(self.ranks)]
        for unit, arrival, start in zip(self.shared.units, self.arrival.tolist(), self.start.tolist(), strict=True):
            if unit.before is not None and arrival < start:
                events[unit.rank] += [(arrival, size_of(unit)), (start, -size_of(unit))]
        return tuple(map(highest, events))


def simulate_ranks(
    shared: SharedSchedule,
    cluster: Cluster,
    execution: str = "launch",
    model: str = "tiles",
    one_rank: float | None = None,
    progress: Progress | None = None,
) -> RankTimeline:
    """Run the backward of a shared schedule in model time. Each rank runs its units in the global sequence.

    execution: `launch` starts a unit when the one before it has ended on its rank; `overlap` starts its chains in sequence as workers
    become free, and adds dK and dV to their sums on the side. Either waits for all states of the unit.
    model: `tiles` knows every task, `chunks` the units alone.
    one_rank: what one rank takes, where another run has found that out already.

    K and V are gathered from the beginning, one KV head after the other in the order of their first use, beside the hops.
    What it costs to load and to store a state is left out, and so is the forward.
    """
    _check(shared, cluster, execution, model)
    overlap = execution == "overlap"
    runner = TileModel(shared, cluster, overlap) if model == "tiles" else ChunkModel(shared, cluster, overlap)
    links = _Links(shared, cluster)
    times = np.zeros((3, len(shared.units)))
    for unit in shared.units:
        arrival = links.arrival.get(unit.number, 0.0)
        sums = max((times[1, other] for other in shared.waits[unit.number]), default=0.0) if unit.leg is None else 0.0
        start, end = runner.run(unit, max(arrival, links.keys(unit), sums))
        links.send(unit, end)
        times[:, unit.number] = start, end, arrival
        if progress is not None:
            progress(unit.number + 1, len(shared.units))
    return RankTimeline(shared, cluster, execution, model, times[0], times[1], times[2], one_rank)


def _check(shared: SharedSchedule, cluster: Cluster, execution: str, model: str) -> None:
    if execution not in EXECUTIONS:
        raise ValueError(f"unknown execution {execution!r}; choose from {', '.join(EXECUTIONS)}")
    if model not in MODELS:
        raise ValueError(f"unknown model {model!r}; choose from {', '.join(MODELS)}")
    if model == "chunks":
        return
    if shared.schedule.workers != cluster.workers:
        raise ValueError(
            f"the tile model compares with the schedule on one rank, which was made for {shared.schedule.workers} workers; the"
            f" cluster's ranks have {cluster.workers}"
        )
    if shared.problem.tasks > MOST_TASKS_OF_TILES:
        raise ValueError(
            f"{shared.problem.tasks:,} tasks are too many for the tile model; at most {MOST_TASKS_OF_TILES:,} (model='chunks' takes more)"
        )


class _Links:
    """When states and gathered keys arrive. A rank sends one thing after the other; gathers have lanes of their own."""

    def __init__(self, shared: SharedSchedule, cluster: Cluster) -> None:
        self.shared, self.cluster = shared, cluster
        self.free = [0.0] * shared.sharding.ranks
        self.arrival: dict[int, float] = {}  # by the number of the unit that the states go to
        self.gathered: dict[tuple[int, int], float] = {}  # by sequence and KV head
        fewest = min(len(shared.sharding.rows_of(rank)) for rank in range(shared.sharding.ranks))
        self.gather_us = cluster.transfer_us(cluster.widths.keys(shared.sharding.rows - fewest))

    def keys(self, unit: Unit) -> float:
        """When K and V of all its heads are there."""
        if unit.leg is None or self.shared.sharding.ranks == 1:
            return 0.0
        heads = [(sequence, part // self.shared.problem.parts) for sequence, part in unit.heads]
        for head in heads:
            self.gathered.setdefault(head, self.cluster.hop_latency_us + (len(self.gathered) + 1) * self.gather_us)
        return max(self.gathered[head] for head in heads)

    def send(self, unit: Unit, end: float) -> None:
        if unit.after is None:
            return
        if not self.shared.hops(unit):
            self.arrival[unit.after] = end
            return
        size = self.cluster.widths.states(self.shared.problem, self.shared.state_tiles(unit))
        self.free[unit.rank] = max(self.free[unit.rank], end) + self.cluster.transfer_us(size)
        self.arrival[unit.after] = self.free[unit.rank] + self.cluster.hop_latency_us


class ChunkModel:
    """A unit is a block of work. This knows no hand-overs inside a unit, so it is kinder than the tile model.

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
