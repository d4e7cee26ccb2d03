"""What the units of one rank walk, as tables for the kernels: runs of legs, a record for each chain of a unit, and endings.

A rank has the rows of its chunks end to end, and the kernels know these rows alone: Q tiles and KV sums are counted from the rank's
first one. A band that masks rows of a chunk begins as many rows further on as the chunk's rows were moved.

Tables are uploaded once for a shared schedule, then used by every backward of it.
"""

from collections.abc import Iterable
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ....scheduling.order import Ints, frozen_ints
from ....scheduling.plan import RUN_FIELDS, Plan
from ....scheduling.problem import Problem
from ....scheduling.ranks.sharding import Sharding
from ....scheduling.ranks.units import Head, SharedSchedule, Unit
from ...kept import Kept
from ..driver.parameters import ChainRecord, EndingRecord
from ..support import check_shared_mask
from ..tiles import BackwardTiles, backward_tiles
from .backward_setup import Sizes
from .tables import DeviceTables, MaskOnDevice, band_of

MOST_TABLES = 64  # of shared schedules and ranks that are kept on devices
Q_FIRST, Q_STRIDE, LENGTH, TURN_MUL, TURN_ADD, _, _, ENTRIES = range(len(RUN_FIELDS))
CHAIN_FIELDS, ENDING_FIELDS = ChainRecord.names, EndingRecord.names
CHAIN_BYTES, ENDING_BYTES = int(ChainRecord.bytes()), int(EndingRecord.bytes())


class RankRows:
    """The rows, Q tiles and KV tiles that a rank has."""

    def __init__(self, problem: Problem, sharding: Sharding, rank: int) -> None:
        chunks = sharding.chunks_of(rank)
        kept = list(accumulate((sharding.lengths[chunk] for chunk in chunks), initial=0))
        # By chunk: how many rows of the sequence are missing before it.
        self.moved = {chunk: sharding.rows_of_chunk(chunk).start - before for chunk, before in zip(chunks, kept[:-1], strict=True)}
        self.count = kept[-1]
        self.keys = problem.kv_len if sharding.ranks == 1 else self.count  # as many as queries, unless one rank has all of them
        # By their numbers in the sequence.
        self.q_tiles = frozen_ints(np.flatnonzero(np.isin(sharding.chunk_of_tiles(problem.tile_q), chunks)))
        self.kv_tiles = frozen_ints(np.flatnonzero(np.isin(sharding.chunk_of_kv_tiles(problem), chunks)))


class LegRuns:
    """The walks of a rank's legs. A leg is a stretch of a chain's runs, so the first and the last run of it may be cut."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.runs: list[NDArray[np.int64]] = []
        self.entries: list[NDArray[np.int64]] = []
        self.entry_count = 0

    def add(self, kind: int, kv_tile: int, steps: slice, moved_tiles: int) -> int:
        """The first run of a leg."""
        first = len(self.runs)
        chain = kind * self.plan.problem.kv_tiles + kv_tile
        begin = 0
        for run in self.plan.runs[self.plan.chain_runs[chain] : self.plan.chain_runs[chain + 1]].astype(np.int64):
            end = begin + int(run[LENGTH])
            low, high = max(begin, steps.start), min(end, steps.stop)
            if low < high:
                self.runs.append(self._cut(run, low - begin, high - low, moved_tiles))
            begin = end
        return first

    def _cut(self, run: NDArray[np.int64], skipped: int, length: int, moved_tiles: int) -> NDArray[np.int64]:
        cut = run.copy()
        cut[LENGTH] = length
        if run[ENTRIES] < 0:
            cut[Q_FIRST] += skipped * run[Q_STRIDE] - moved_tiles
            cut[TURN_ADD] += skipped * run[TURN_MUL]
            return cut
        listed = self.plan.entries[run[ENTRIES] + skipped :][:length].astype(np.int64)
        self.entries.append(listed - np.array([moved_tiles, 0, 0]))
        cut[ENTRIES] = self.entry_count
        self.entry_count += length
        return cut


class LegTables:
    """The tables of a rank. `records` of a unit, and `endings` of the last ones, follow each other in the order of its chains."""

    def __init__(self, plan: Plan, shared: SharedSchedule, rank: int, tiles: BackwardTiles) -> None:
        check_shared_mask(plan.problem.mask)
        self.plan, self.shared, self.rows = plan, shared, RankRows(plan.problem, shared.sharding, rank)
        self.units = shared.by_rank[rank]
        self.sizes = self._sizes(tiles)
        self.semaphore_of = self._semaphores_of_states()
        self._legs: dict[tuple[int, int, int], tuple[Ints, Ints]] = {}
        self._runs = LegRuns(plan)
        self.records, self.chains = self._joined([unit for unit in self.units if unit.leg is not None], self.records_of, CHAIN_FIELDS)
        self.endings, self.ends = self._joined([unit for unit in self.units if unit.leg is None], self._endings_of, ENDING_FIELDS)
        self.runs = frozen_ints(np.array(self._runs.runs, dtype=np.int64).reshape(-1, len(RUN_FIELDS)))
        self.entries = frozen_ints(np.concatenate([np.zeros((0, 3), dtype=np.int64), *self._runs.entries]))
        self.q_turns = frozen_ints(plan.turns_per_q_tile[self.rows.q_tiles])
        # Of every leg: the next ticket, and how many there are; and by unit, which row that is.
        self.counters = frozen_ints(np.array([(0, len(chains)) for chains in self.chains.values()]).reshape(-1, 2))
        self.counter_of = {unit: row for row, unit in enumerate(self.chains)}

    @property
    def tables(self) -> dict[str, Ints]:
        """What the rank gets."""
        return {name: getattr(self, name) for name in ("runs", "entries", "records", "endings", "q_turns", "counters")}

    def _sizes(self, tiles: BackwardTiles) -> Sizes:
        problem, rows = self.plan.problem, self.rows
        return Sizes(
            batch=problem.batch,
            q_heads=problem.heads * problem.group,
            kv_heads=problem.heads,
            rows=rows.count,
            keys=rows.keys,
            q_tiles=len(rows.q_tiles),
            kv_tiles=len(rows.kv_tiles),
            sums=self.plan.sums,
            pieces=tiles.sum_pieces,
            states=sum(self.shared.state_tiles(unit) for unit in self.units if unit.leg is not None),
        )

    def _semaphores_of_states(self) -> dict[int, int]:
        """By unit: the first one of the states that it leaves."""
        found, states = {}, 0
        for unit in self.units:
            if unit.leg is not None:
                found[unit.number] = self.sizes.dq_tiles + states * self.sizes.pieces
                states += self.shared.state_tiles(unit)
        return found

    def _joined(self, units: Iterable[Unit], rows_of: Any, fields: list[str]) -> tuple[Ints, dict[int, range]]:
        """A table, and which of its rows are those of each unit."""
        parts, rows, first = [np.zeros((0, len(fields)), dtype=np.int32)], {}, 0
        for unit in units:
            parts.append(rows_of(unit))
            rows[unit.number] = range(first, first + len(parts[-1]))
            first += len(parts[-1])
        return frozen_ints(np.concatenate(parts)), rows

    def records_of(self, unit: Unit, heads: tuple[Head, ...] | None = None) -> Ints:
        """The chains of a leg, of all heads or of some, by ticket: position by position, head by head. A chain waits for those of its
        own head that are before it, so any number of workers can run them."""
        assert unit.leg is not None
        leg, column = self.shared.leg_of(unit), self.shared.column_of(unit)
        places = [place for place, head in enumerate(unit.heads) if heads is None or head in heads]
        position, place = (grid.ravel() for grid in np.meshgrid(np.arange(len(leg.kv_tiles)), places, indexing="ij"))
        first_run, steps = (values[position] for values in self._leg(unit))
        sequence, kv_head, q_head = np.array([self._head(*head, unit.member) for head in unit.heads])[place].T
        kv_tile = np.array(leg.kv_tiles)[position]
        slot = place * len(column.kv_tiles) + np.searchsorted(column.kv_tiles, kv_tile)
        first_key = kv_tile * self.plan.problem.tile_kv
        fields = {
            "kv_head": kv_head,
            "kv_row": first_key,
            "kv_plane": sequence,
            "steps": steps,
            "q_plane": sequence,
            "keys": self.plan.problem.kv_len - first_key,
            "band_top": self._band_top(leg.chunk) - first_key,
            "first_run": first_run,
            "first_dq_tile": (sequence * self.sizes.q_heads + q_head) * self.sizes.q_tiles,
            "walk": 2 * steps,
            "q_head": q_head,
            "members": np.ones_like(steps),
            "first_sum": self.semaphore_of[unit.number] + slot * self.sizes.pieces,
        }
        nothing = np.zeros_like(steps)  # q_shift and gang_end, and the turn of a state: it is stored
        return frozen_ints(np.stack([fields.get(name, nothing) for name in CHAIN_FIELDS], axis=1))

    def _head(self, sequence: int, part: int, member: int) -> tuple[int, int, int]:
        """(sequence, KV head, query head) of a head of a unit, for the member whose turn it is."""
        problem = self.plan.problem
        return sequence, part // problem.parts, problem.members(part).start + self.plan.members(part)[member]

    def _band_top(self, chunk: int) -> int:
        """For the first key: the mask's own, as many rows further on as the chunk's rows were moved. Other masks have none."""
        problem = self.plan.problem
        if problem.mask.sides is None:
            return 0
        return problem.kv_len - problem.q_len + band_of(problem.mask.sides)[0] + self.rows.moved[chunk]

    def _leg(self, unit: Unit) -> tuple[Ints, Ints]:
        """First run and steps of the chains of a leg."""
        assert unit.leg is not None
        key = unit.kind, unit.column, unit.leg
        if key not in self._legs:
            leg, trips = self.shared.leg_of(unit), self.shared.trips[unit.kind]
            moved = self.rows.moved[leg.chunk] // self.plan.problem.tile_q
            stretches = [trips.steps(kv_tile, unit.leg) for kv_tile in leg.kv_tiles]
            first = [self._runs.add(unit.kind, kv, steps, moved) for kv, steps in zip(leg.kv_tiles, stretches, strict=True)]
            self._legs[key] = frozen_ints(first), frozen_ints([steps.stop - steps.start for steps in stretches])
        return self._legs[key]

    def _endings_of(self, unit: Unit) -> Ints:
        """The states of a column's KV tiles, those of parts that add to one sum together."""
        kv_tiles = self.shared.column_of(unit).kv_tiles
        own, parts = np.searchsorted(self.rows.kv_tiles, kv_tiles), self.plan.problem.parts
        endings = []
        by_head = sorted((head, place) for place, head in enumerate(unit.heads))
        for (sequence, kv_head), members in groupby(by_head, key=lambda one: (one[0][0], one[0][1] // parts)):
            heads, places = zip(*members, strict=True)
            sums = [self.plan.sum_of(part) for _, part in heads]
            number, turn = sums[0]
            apart = places[1] - places[0] if len(places) > 1 else 1
            assert sums == [(number, turn + i) for i in range(len(sums))], "parts of one kind that follow each other have turns that do"
            assert places == tuple(places[0] + apart * i for i in range(len(places))), "parts of a group are dealt evenly"
            for place, tile in enumerate(own.tolist()):
                target = ((sequence * self.sizes.kv_heads + kv_head) * self.sizes.kv_tiles + tile) * self.sizes.sums + number
                endings.append((target, turn, places[0] * len(kv_tiles) + place, len(sums), apart * len(kv_tiles)))
        assert len({ending[0] for ending in endings}) == len(endings), "blocks of one launch have no order: a sum has one ending"
        return frozen_ints(endings)


class LegsOnDevice:
    """The tables of a rank's legs on its device."""

    def __init__(self, plan: Plan, shared: SharedSchedule, rank: int, dims: tuple[int, int], where: torch.device) -> None:
        self.host, self.where = LegTables(plan, shared, rank, backward_tiles(*dims)), where
        self.tables = DeviceTables(self.host.tables, where)
        problem, rows = plan.problem, shared.sharding.rows_of(rank).astype(np.int64)
        self.mask = MaskOnDevice(problem.mask, problem.q_len, problem.kv_len, where, rows)  # of rows that lie end to end
        self._some: dict[tuple[int, tuple[Head, ...]], DeviceTables] = {}

    def records(self, unit: Unit) -> int:
        return self.tables["records"] + CHAIN_BYTES * self.host.chains[unit.number].start

    def endings(self, unit: Unit) -> int:
        return self.tables["endings"] + ENDING_BYTES * self.host.ends[unit.number].start

    def of_some_heads(self, unit: Unit, heads: tuple[Head, ...]) -> DeviceTables:
        """Records of a unit whose heads do not run at once, made when they are first asked for."""
        key = unit.number, heads
        if key not in self._some:
            records = self.host.records_of(unit, heads)
            self._some[key] = DeviceTables({"records": records, "counters": np.array([0, len(records)])}, self.where)
        return self._some[key]


_kept: Kept[LegsOnDevice] = Kept(MOST_TABLES)


def legs_on_device(plan: Plan, shared: SharedSchedule, rank: int, dims: tuple[int, int], where: torch.device) -> LegsOnDevice:
    """Uploaded once for a shared schedule, which must be the same object."""
    key = shared, rank, dims, where
    found = _kept.get(key)
    if found is None:
        found = LegsOnDevice(plan, shared, rank, dims, where)
        for old in _kept.put(key, found):
            torch.cuda.synchronize(old.where)  # launches on any stream may still read them; here they go
    return found
