"""Slow, obvious versions of what the core computes, written without looking at how it computes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from dash_attn.masks import EMPTY, FULL, PARTIAL, Causal, Documents, Full, Mask, Prefix, TileMap, Window
from dash_attn.scheduling.engine import Costs
from dash_attn.scheduling.order import HeadOrder
from dash_attn.scheduling.schedule import Schedule


def attends(mask: Mask, q: int, kv: int, q_len: int, kv_len: int) -> bool:
    """The definition of every mask, for one query and one key."""
    position = q + kv_len - q_len  # the last query stands at the last key
    if isinstance(mask, Full):
        return True
    if isinstance(mask, Causal):
        return kv <= position
    if isinstance(mask, Window):
        return (mask.left == -1 or kv >= position - mask.left) and (mask.right == -1 or kv <= position + mask.right)
    if isinstance(mask, Prefix):
        return kv < mask.length or kv <= position
    if isinstance(mask, Documents):
        document_of = [number for number, length in enumerate(mask.lengths) for _ in range(length)]
        return document_of[q] == document_of[kv] and (kv <= q or not mask.causal)
    assert isinstance(mask, TileMap)
    return bool(mask.blocks[q // mask.block_q, kv // mask.block_kv])


def elements(mask: Mask, q_len: int, kv_len: int) -> np.ndarray:
    return np.array([[attends(mask, q, kv, q_len, kv_len) for kv in range(kv_len)] for q in range(q_len)])


def tile_map(mask: Mask, q_len: int, kv_len: int, tile_q: int, tile_kv: int) -> np.ndarray:
    """Any kept element keeps the tile; a whole tile with every element kept is FULL."""
    kept = elements(mask, q_len, kv_len)
    rows, columns = range(0, q_len, tile_q), range(0, kv_len, tile_kv)
    return np.array([[_tile_state(kept[q : q + tile_q, kv : kv + tile_kv], tile_q * tile_kv) for kv in columns] for q in rows])


def _tile_state(tile: np.ndarray, whole: int) -> int:
    if not tile.any():
        return EMPTY
    return FULL if tile.sum() == whole else PARTIAL


@dataclass(frozen=True)
class _Reduce:
    """One add to global memory: a contribution to a tile of dQ, behind a compute; or a piece of dK and dV at the end of a chain."""

    to: tuple[object, ...]
    turn: int
    behind_a_compute: bool = True


@dataclass
class _Running:
    """A resident chain of the clocked machine below. What adds dK and dV has a place in `compute`, too: when it has room."""

    reduces: list[_Reduce]
    start: int
    compute: list[int] = field(default_factory=list)
    reduce: dict[int, int] = field(default_factory=dict)


class Clockwork:
    """The cost model of DESIGN.md, clocked one tick at a time: everything that may start at a tick does."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.costs, self.workers = costs, schedule.workers
        self.queue = [_reduces_of(schedule, ticket) for ticket in schedule.tickets.tolist()]
        self.chains: list[_Running] = []
        self.landed: dict[tuple[tuple[object, ...], int], int] = {}  # (where, turn) -> start of that reduce
        self.now = 0

    def run(self, limit: int = 100_000) -> Clockwork:
        while self.queue or any(not self._ended(chain) for chain in self.chains):
            while self._something_starts():
                pass
            self.now += 1
            if self.now > limit:
                raise TimeoutError("nothing ends: a deadlock, or costs too large for a clocked run")
        return self

    @property
    def chain_start(self) -> list[int]:
        return [chain.start for chain in self.chains]

    @property
    def compute_start(self) -> list[int]:
        return [chain.compute[i] for chain in self.chains for i in _tasks(chain)]

    @property
    def reduce_start(self) -> list[int]:
        return [chain.reduce[i] for chain in self.chains for i in _tasks(chain)]

    @property
    def chain_end(self) -> list[int]:
        ends = [[t + self.costs.reduce for t in chain.reduce.values()] for chain in self.chains]
        return [max(of_chain, default=chain.start) for chain, of_chain in zip(self.chains, ends, strict=True)]

    @property
    def makespan(self) -> int:
        return max(self.chain_end)

    def _something_starts(self) -> bool:
        resident = [chain for chain in self.chains if not self._ended(chain)]
        started = sum(self._step(chain) for chain in resident) > 0  # every chain gets its step
        if self.queue and len(resident) < self.workers:
            self.chains.append(_Running(self.queue.pop(0), self.now))
            started = True
        return started

    def _step(self, chain: _Running) -> bool:
        before = len(chain.compute) + len(chain.reduce)
        if len(chain.compute) < len(chain.reduces) and self._may_compute(chain, len(chain.compute)):
            chain.compute.append(self.now)
        for index in range(len(chain.compute)):
            if index not in chain.reduce and self._may_reduce(chain, index):
                what = chain.reduces[index]
                chain.reduce[index] = self.landed[what.to, what.turn] = self.now
        return len(chain.compute) + len(chain.reduce) > before

    def _may_compute(self, chain: _Running, index: int) -> bool:
        ready = self._computed(chain, index - 1) if index else chain.start + self.costs.startup
        return ready <= self.now and self._reduced(chain, index - 1 - self.costs.overlap)

    def _may_reduce(self, chain: _Running, index: int) -> bool:
        what = chain.reduces[index]
        before = self.landed.get((what.to, what.turn - 1))
        hand_over = max(self.costs.reduce, self.costs.latency)
        in_turn = what.turn == 0 or (before is not None and before + hand_over <= self.now)
        computed = self._computed(chain, index) <= self.now
        return computed and in_turn and self._reduced(chain, index - max(1, self.costs.overlap))

    def _computed(self, chain: _Running, index: int) -> int:
        return chain.compute[index] + (self.costs.compute if chain.reduces[index].behind_a_compute else 0)

    def _reduced(self, chain: _Running, index: int) -> bool:
        return index < 0 or (index in chain.reduce and chain.reduce[index] + self.costs.reduce <= self.now)

    def _ended(self, chain: _Running) -> bool:
        return all(self._reduced(chain, index) for index in range(len(chain.reduces)))


def _tasks(chain: _Running) -> list[int]:
    return [i for i, what in enumerate(chain.reduces) if what.behind_a_compute]


def dealt(group: int, parts: int) -> list[list[int]]:
    """The query heads of a group by part: as evenly as can be, in order, small parts first."""
    sizes = sorted(len(range(first, group, parts)) for first in range(parts))
    heads = iter(range(group))
    return [list(islice(heads, size)) for size in sizes]


def _reduces_of(schedule: Schedule, ticket: list[int]) -> list[_Reduce]:
    """What a chain adds, in order: to dQ step by step; at its end dK and dV, if its group has more than one part."""
    problem, (sequence, number, kv_tile) = schedule.problem, ticket
    kv_head, part = divmod(number, problem.parts)
    kinds = schedule.order.kinds
    order = kinds[((problem.head_offset + kv_head) * problem.parts + part) % len(kinds)]
    heads = [kv_head * problem.group + member for member in dealt(problem.group, problem.parts)[part]]
    steps = list(zip(order.walk(kv_tile).tolist(), order.turns(kv_tile).tolist(), strict=True))
    in_order = heads[::-1] if order.last_member_first else heads
    contributions = [_Reduce(("dQ", sequence, head, q_tile), turn) for head in in_order for q_tile, turn in steps]
    if problem.parts == 1:
        return contributions
    before = [earlier for earlier in range(part) if (part - earlier) % len(kinds) == 0]  # parts of this kind share a sum
    pieces = [(what, first) for what in ("dK", "dV") for first in range(0, problem.tile_kv, problem.tile_q)]
    where = (sequence, kv_head, kv_tile, part % len(kinds))
    return contributions + [_Reduce((*piece, *where), len(before), behind_a_compute=False) for piece in pieces]


def can_finish(schedule: Schedule, workers: int) -> bool:
    """Whether the untimed execution completes: any resident chain moves on as soon as its turn has its turn."""
    queue = [_reduces_of(schedule, ticket) for ticket in schedule.tickets.tolist()]
    resident: list[list[_Reduce]] = []
    landed: dict[tuple[object, ...], int] = {}
    moved = True
    while moved:
        moved = False
        resident = [chain for chain in resident if chain]
        while queue and len(resident) < workers:
            resident.append(queue.pop(0))
            moved = True
        for chain in resident:
            if chain and chain[0].turn == landed.get(chain[0].to, 0):
                to = chain.pop(0).to
                landed[to] = landed.get(to, 0) + 1
                moved = True
    return not queue and not any(resident)


def mirrored(order: HeadOrder) -> HeadOrder:
    """The same order played backwards in time: walks, turns and query heads reversed."""
    turns_of = np.bincount(order.q_tile, minlength=1)
    position = np.arange(len(order.q_tile)) - order.offsets[order.chain]
    reversed_tasks = order.offsets[order.chain + 1] - 1 - position
    q_tile = order.q_tile[reversed_tasks]
    last_step = order.first_step + np.diff(order.offsets)
    turns = turns_of[q_tile] - 1 - order.turn[reversed_tasks]
    return HeadOrder(order.offsets, q_tile, turns, last_step.max() - last_step, not order.last_member_first)
