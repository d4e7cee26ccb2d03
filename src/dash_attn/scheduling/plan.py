"""A schedule lowered to small int32 tables. The CPU executor and the GPU kernels walk the same tables.

A chain is a few runs: constant Q stride, turns on a digital line (docs/how-a-call-runs.md, plan tables). Tables are shared by all heads
of a kind and all sequences, and full, causal, window, document and prefix masks need at most 48 runs per chain, so their plans are linear
in tokens and independent of batch x heads. A tile map without regularity lists every kept tile of a head.
"""

import hashlib
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import gcd

import numpy as np
from numpy.typing import NDArray

from .order import Ints, Sum, frozen_ints, members
from .problem import Problem
from .schedule import Placement, Schedule

Array = NDArray[np.int64]
Run = tuple[int, int, int, int, int, int, int, int]
RUN_FIELDS = ("q_first", "q_stride", "length", "turn_mul", "turn_add", "turn_div", "partial", "entries")
ENTRY_FIELDS = 3
ORDER_DIGITS = 16  # of order_hash
FEW_RUNS, MOST_RUNS = 16, 48  # of a chain; weave's blocks of 32 chains need up to 33. More are listed entry by entry
NO_ENTRIES = -1
LARGEST_DIVISOR = 32  # of a slope guessed from the turns; tile ratios may be larger


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
        return sum(table.nbytes for table in (self.starts, self.chain_runs, self.runs, self.entries, self.turns_per_q_tile))

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

    @cached_property
    def order_hash(self) -> str:
        """Names the bits: equal for plans that sum everything in the same sequence, whatever the batch and the machine."""
        problem = self.problem
        tiling = (problem.tile_q, problem.tile_kv, self.kind_of(0), *self.last_member_first)
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
        return self.problem.kind_of(part, self.kinds)

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

    def _decode(self, run: Ints) -> Array:
        q_first, q_stride, length, turn_mul, turn_add, turn_div, partial, entries = run.tolist()
        if entries >= 0:
            return self.entries[entries : entries + length].astype(np.int64)
        i = np.arange(length)
        return np.stack([q_first + i * q_stride, (turn_mul * i + turn_add) // turn_div, np.full(length, partial)], axis=1)


def lower(schedule: Schedule) -> Plan:
    """Lower a schedule to tables."""
    problem = schedule.problem
    runs: list[Run] = []
    entries: list[Array] = []
    entry_count = 0
    chain_runs = [0]
    for kind in schedule.order.kinds:
        for kv_tile in range(problem.kv_tiles):
            walk = kind.walk(kv_tile)
            steps = np.stack([walk, kind.turns(kv_tile), problem.partial[walk, kv_tile]], axis=1).astype(np.int64)
            compressed = _compress(steps, (problem.tile_q, problem.tile_kv))
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


def _compress(steps: Array, tile_slope: tuple[int, int]) -> list[Run] | None:
    """The runs of one chain, given its rows (q_tile, turn, partial), or None when it needs too many: many are worth it only where they
    take less room than the entries of the chain would."""
    q_tile, turn, partial = steps.T
    most = min(MOST_RUNS, max(FEW_RUNS, (ENTRY_FIELDS * len(steps) - 1) // len(RUN_FIELDS)))
    stretches = _straight(q_tile, partial, most)
    if stretches is None:
        return None
    runs: list[Run] = []
    for first, stop in stretches:
        stride = int(q_tile[first + 1] - q_tile[first]) if stop - first > 1 else 1
        while first < stop:
            length, line = _longest_line(turn[first:stop], tile_slope)
            runs.append((int(q_tile[first]), stride, length, *line, int(partial[first]), NO_ENTRIES))
            first += length
            if len(runs) > most:
                return None
    return runs


def _straight(q_tile: Array, partial: Array, most: int) -> list[tuple[int, int]] | None:
    """Maximal slices with one Q stride and one partial flag. None on irregular walks, which have more than `most`."""
    stride = np.diff(q_tile)
    same_flag = partial[1:] == partial[:-1]
    bends = np.flatnonzero((stride[1:] != stride[:-1]) | ~same_flag[1:] | ~same_flag[:-1]) + 1
    if len(bends) > 3 * most:
        return None
    stretches, first = [], 0
    while first < len(q_tile):
        stop = first + 1
        if stop < len(q_tile) and same_flag[first]:
            later = bends[np.searchsorted(bends, first + 1) :]
            stop = int(later[0]) + 1 if len(later) else len(q_tile)
        stretches.append((first, stop))
        first = stop
    return stretches if len(stretches) <= most else None


def _longest_line(turn: Array, tile_slope: tuple[int, int]) -> tuple[int, tuple[int, int, int]]:
    """Length of the longest prefix with turn[i] == (mul * i + add) // div, and that (mul, add, div)."""
    if (turn == turn[0]).all():
        return len(turn), (0, int(turn[0]), 1)
    slopes = _candidate_slopes(turn, tile_slope)
    mul, div = slopes[:, :1], slopes[:, 1:]
    i = np.arange(len(turn))
    # turn * div <= mul * i + add < (turn + 1) * div bounds `add` from both sides
    least = np.maximum.accumulate(turn * div - mul * i, axis=1)
    most = np.minimum.accumulate((turn + 1) * div - 1 - mul * i, axis=1)
    fits = least <= most
    lengths = np.where(fits.all(axis=1), len(turn), np.argmin(fits, axis=1))
    best = int(np.argmax(lengths))
    length = int(lengths[best])
    return length, (int(mul[best, 0]), int(least[best, length - 1]), int(div[best, 0]))


def _candidate_slopes(turn: Array, tile_slope: tuple[int, int]) -> Array:
    """Slopes (mul, div) worth trying: flat, the tile ratio, the first pace at which this walk's turns change, and the mean pace."""
    changes = np.flatnonzero(np.diff(turn))
    rise = int(turn[changes[0] + 1] - turn[changes[0]])
    pace = int(changes[1] - changes[0]) if len(changes) > 1 else len(turn)
    common = gcd(*tile_slope)
    a, b = tile_slope[0] // common, tile_slope[1] // common
    # With a small denominator: a long digital line shows its slope only up to rounding.
    mean = Fraction(int(turn[changes[-1]] - turn[changes[0]]), max(1, int(changes[-1] - changes[0]))).limit_denominator(LARGEST_DIVISOR)
    return np.array([(0, 1), (rise, 1), (rise, pace), (a, b), (-a, b), (mean.numerator, mean.denominator)])


@dataclass(frozen=True, eq=False)
class VisitTables:
    """The forward's tables: which KV tiles each Q tile visits. A Q tile is one worker's alone, so nothing has to be ordered. KV tiles go
    downward, and Q tiles with many visits are taken first. Both are functions of the problem alone.

    Q tile `q` owns the runs first_runs[q]:first_runs[q + 1]; a run is (first KV tile, 2 * length + partial).

    `q_order` leaves out Q tiles that visit nothing: their output is 0 without any work.
    """

    q_order: Ints
    first_runs: Ints
    runs: Ints
    visits: Ints


def visit_tables(problem: Problem) -> VisitTables:
    runs: list[tuple[int, int]] = []
    first_runs = [0]
    for q_tile in range(problem.q_tiles):
        kv_tiles = np.flatnonzero(problem.kept[q_tile])[::-1]
        partial = problem.partial[q_tile, kv_tiles]
        breaks = np.flatnonzero((np.diff(kv_tiles) != -1) | (np.diff(partial.astype(np.int8)) != 0)) + 1
        for part in np.split(np.arange(len(kv_tiles)), breaks):
            if len(part):
                runs.append((int(kv_tiles[part[0]]), 2 * len(part) + int(partial[part[0]])))
        first_runs.append(len(runs))
    visits = problem.turns_per_q_tile
    longest_first = np.lexsort((-np.arange(problem.q_tiles), -visits))[: np.count_nonzero(visits)]
    return VisitTables(
        frozen_ints(longest_first), frozen_ints(first_runs), frozen_ints(np.array(runs, dtype=np.int32).reshape(-1, 2)), frozen_ints(visits)
    )
