"""Units of ranks that share a sequence, run without numbers: every turn and every sum must come when it may."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from random import Random

from dash_attn.scheduling.ranks.units import SharedSchedule, Unit


class OutOfTurn(AssertionError):
    """A task, an ending or a state came before its turn, or after it."""


def any_order(shared: SharedSchedule, random: Random) -> list[Unit]:
    """All units, each behind those that it waits for, and otherwise drawn."""
    waiting = [set(waits) for waits in shared.waits]
    followers = defaultdict(list)
    for number, waits in enumerate(shared.waits):
        for earlier in waits:
            followers[earlier].append(number)
    ready, order = [number for number, waits in enumerate(waiting) if not waits], []
    while ready:
        number = ready.pop(random.randrange(len(ready)))
        order.append(shared.units[number])
        for follower in followers[number]:
            waiting[follower].remove(number)
            if not waiting[follower]:
                ready.append(follower)
    return order


def run(shared: SharedSchedule, units: Iterable[Unit]) -> int:
    """Run units chain by chain, in their order. Returns the number of tasks."""
    return _Run(shared).all(units)


class _Run:
    def __init__(self, shared: SharedSchedule) -> None:
        self.shared, self.schedule, self.problem = shared, shared.schedule, shared.problem
        self.landed: dict[tuple[int, ...], int] = defaultdict(int)  # turns, by sequence, query head and Q tile
        self.walked: dict[tuple[int, ...], int] = defaultdict(int)  # steps, by sequence, part, member and KV tile
        self.ended: dict[tuple[int, ...], list[int]] = defaultdict(list)  # parts, by sequence, KV head, kind and KV tile
        self.at: dict[int, int] = {}  # which rank has the states behind a unit
        self.tasks = 0

    def all(self, units: Iterable[Unit]) -> int:
        for unit in units:
            self._take_state(unit)
            for head in unit.heads:
                for kv_tile in self.shared.column_of(unit).kv_tiles if unit.leg is None else self.shared.leg_of(unit).kv_tiles:
                    self._end(unit, head, kv_tile) if unit.leg is None else self._walk(unit, head, kv_tile)
        if self.at or any(parts != sorted(parts) for parts in self.ended.values()):
            raise OutOfTurn("states are left over, or parts were summed in another order")
        return self.tasks

    def _take_state(self, unit: Unit) -> None:
        if unit.before is not None and self.at.pop(unit.before, None) != unit.rank:
            raise OutOfTurn(f"the states before {unit} are not there")
        if unit.after is not None:
            assert self.shared.units[unit.after].before == unit.number
            self.at[unit.number] = self.shared.units[unit.after].rank

    def _walk(self, unit: Unit, head: tuple[int, int], kv_tile: int) -> None:
        assert unit.leg is not None
        (sequence, part), order = head, self.schedule.order_of(head[1])
        steps = self.shared.trips[unit.kind].steps(kv_tile, unit.leg)
        if self.walked[sequence, part, unit.member, kv_tile] != steps.start:
            raise OutOfTurn(f"kv{kv_tile} of {unit} does not go on where it stopped")
        self.walked[sequence, part, unit.member, kv_tile] = steps.stop
        sharding, query_head = self.shared.sharding, self.problem.members(part)[unit.member]
        chunks = sharding.chunk_of_tiles(self.problem.tile_q)
        for q_tile, turn in zip(order.walk(kv_tile)[steps].tolist(), order.turns(kv_tile)[steps].tolist(), strict=True):
            assert sharding.owners[chunks[q_tile]] == unit.rank
            if self.landed[sequence, query_head, q_tile] != turn:
                raise OutOfTurn(f"q{q_tile} of {unit} has turn {turn}")
            self.landed[sequence, query_head, q_tile] += 1
            self.tasks += 1

    def _end(self, unit: Unit, head: tuple[int, int], kv_tile: int) -> None:
        (sequence, part), sharding = head, self.shared.sharding
        assert sharding.owners[sharding.chunk_of_tiles(self.problem.tile_kv)[kv_tile]] == unit.rank
        for member in range(len(self.problem.members(part))):
            if self.walked[sequence, part, member, kv_tile] != len(self.schedule.order_of(part).walk(kv_tile)):
                raise OutOfTurn(f"kv{kv_tile} of {unit} ends before its walk")
        self.ended[sequence, part // self.problem.parts, unit.kind, kv_tile].append(part)
