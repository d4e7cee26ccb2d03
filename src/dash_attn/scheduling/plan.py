"""A schedule lowered to small int32 tables. The CPU executor and the GPU kernels walk the same tables.

A chain is a few runs (docs/how-a-call-runs.md, plan tables). Tables are shared by all heads of a kind and all sequences, and full,
causal, window, document and prefix masks need at most 48 runs per chain, so their plans are linear in tokens and
independent of batch x heads. A tile map without regularity lists every kept tile of a head.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .order import HeadOrder, Ints, Sum, frozen_ints, kind_of_part, members
from .problem import Problem
from .schedule import Placement, Schedule
from .walk_runs import Run, compress

RUN_FIELDS = ("q_first", "q_stride", "length", "turn_mul", "turn_add", "turn_div", "partial", "entries")
ENTRY_FIELDS = 3
ORDER_DIGITS = 16  # of order_hash
FEW_RUNS, MOST_RUNS = 16, 48  # of a chain; weave's blocks of 32 chains need up to 33. More are listed entry by entry


@dataclass(frozen=True, eq=False)
class Plan:
    """What a backend needs. Chain `kv` of a head of kind `k` owns the runs chain_runs[k * kv_tiles + kv] up to the next."""

    problem: Problem
    schedule_name: str
    guarantees: tuple[str, ...]
    placement: Placement
    gang: int
    last_member_first: tuple[bool, ...]  # per kind: in which order a chain takes the query heads of its part
    chain_runs: Ints  # [kinds * kv_tiles + 1]
    runs: Ints  # [runs, 8]: RUN_FIELDS
    entries: Ints  # [entries, 3]: q_tile, turn, partial
    turns_per_q_tile: Ints  # [q_tiles]: chains that add to each dQ tile; 0 means dQ is zero there

    @cached_property
    def tables_bytes(self) -> int:
        return sum(t.nbytes for t in self._tables)

    @cached_property
    def chain_steps(self) -> Ints:
        """Q tiles each chain visits, in the order of chain_runs."""
        before = np.concatenate([[0], np.cumsum(self.runs[:, RUN_FIELDS.index("length")])])
        return frozen_ints(np.diff(before[self.chain_runs]))

    @property
    def workers(self) -> int:
        return self.placement.workers

    @property
    def kinds(self) -> int:
        return len(self.placement.starts)

    @cached_property
    def starts(self) -> Ints:
        """[kinds, kv_tiles]: start order of a head's KV tiles."""
        return frozen_ints(np.stack(self.placement.starts))

    @property
    def _tables(self) -> tuple[Ints, ...]:
        return (self.starts, self.chain_runs, self.runs, self.entries, self.turns_per_q_tile)

    @cached_property
    def order_hash(self) -> str:
        """Names the bits: equal for plans that sum everything in the same sequence, whatever the batch and the machine."""
        problem = self.problem
        first_kind = problem.head_offset * problem.parts % self.kinds
        tiling = (problem.tile_q, problem.tile_kv, first_kind, *self.last_member_first)
        if problem.parts > 1:
            tiling += (problem.group, problem.parts)
        digest = hashlib.sha256(np.array(tiling, dtype=np.int64).tobytes())
        for kind in range(self.kinds):
            for kv_tile in range(self.problem.kv_tiles):
                steps = self.steps(kind, kv_tile)
                digest.update(np.int64(len(steps)).tobytes() + steps[:, :2].tobytes())
        return digest.hexdigest()[:ORDER_DIGITS]

    def steps(self, kind: int, kv_tile: int) -> Ints:
        """The walk of a chain, decoded: rows (q_tile, turn, partial)."""
        chain = kind * self.problem.kv_tiles + kv_tile
        decoded = [self._decode(run) for run in self.runs[self.chain_runs[chain] : self.chain_runs[chain + 1]]]
        return frozen_ints(np.concatenate(decoded)) if decoded else frozen_ints(np.zeros((0, 3)))

    def members(self, part: int) -> list[int]:
        """The query heads of a part, counted from its first, in the order a chain takes them; it makes its whole walk for each."""
        last_first = self.last_member_first[self.kind_of(part)]
        return [int(member) for member in members(len(self.problem.members(part)), last_first)]

    def kind_of(self, part: int) -> int:
        return kind_of_part(self.problem, part, self.kinds)

    @property
    def sums(self) -> int:
        """Sums of dK and dV per KV tile of a KV head: one for each kind of its parts."""
        return Sum.how_many(self.problem, self.kinds)

    @property
    def parts_of_sums(self) -> list[int]:
        """How many parts add to each of them."""
        return [-(-(self.problem.parts - number) // self.kinds) for number in range(self.sums)]

    def sum_of(self, part: int) -> Sum:
        return Sum.of_part(self.problem, part, self.kinds)

    def _decode(self, run: Ints) -> NDArray[np.int64]:
        q_first, q_stride, length, turn_mul, turn_add, turn_div, partial, entries = run.tolist()
        if entries >= 0:
            return self.entries[entries : entries + length].astype(np.int64)
        i = np.arange(length)
        return np.stack([q_first + i * q_stride, (turn_mul * i + turn_add) // turn_div, np.full(length, partial)], axis=1)


def lower(schedule: Schedule) -> Plan:
    """Lower a schedule to tables."""
    problem = schedule.problem
    runs: list[Run] = []
    entries: list[NDArray[np.int64]] = []
    entry_count = 0
    chain_runs = [0]
    for kind in schedule.order.kinds:
        for kv_tile in range(problem.kv_tiles):
            steps = _steps_of(kind, kv_tile, problem)
            compressed = compress(steps[:, 0], steps[:, 1], steps[:, 2], (problem.tile_q, problem.tile_kv), _most_runs(len(steps)))
            if compressed is None:  # irregular: list every entry
                compressed = [(0, 0, len(steps), 0, 0, 1, 0, entry_count)]
                entries.append(steps)
                entry_count += len(steps)
            runs += compressed
            chain_runs.append(len(runs))
    return Plan(
        problem=problem,
        schedule_name=schedule.name,
        guarantees=schedule.guarantees,
        placement=schedule.placement,
        gang=schedule.gang,
        last_member_first=tuple(kind.last_member_first for kind in schedule.order.kinds),
        chain_runs=frozen_ints(chain_runs),
        runs=frozen_ints(np.array(runs, dtype=np.int32).reshape(-1, len(RUN_FIELDS))),
        entries=frozen_ints(np.concatenate(entries) if entries else np.zeros((0, 3))),
        turns_per_q_tile=frozen_ints(problem.turns_per_q_tile),
    )


def _most_runs(steps: int) -> int:
    """Many are worth it only where they take less room than the entries of a chain would."""
    return min(MOST_RUNS, max(FEW_RUNS, (ENTRY_FIELDS * steps - 1) // len(RUN_FIELDS)))


def _steps_of(kind: HeadOrder, kv_tile: int, problem: Problem) -> NDArray[np.int64]:
    """Rows (q_tile, turn, partial) of one chain."""
    walk = kind.walk(kv_tile)
    return np.stack([walk, kind.turns(kv_tile), problem.partial[walk, kv_tile]], axis=1).astype(np.int64)
