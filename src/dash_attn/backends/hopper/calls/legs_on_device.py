"""Tables of legs on the device: uploaded once for a shared schedule, then used by every backward of it."""

from __future__ import annotations

import numpy as np
import torch

from ....scheduling.plan import Plan
from ....scheduling.ranks.units import Head, SharedSchedule, Unit
from ...recently_used import Kept
from ..driver.parameters import ChainRecord, EndingRecord
from ..tiles import backward_tiles
from .leg_tables import LegTables
from .rank_masks import MaskOfRank
from .tables import DeviceTables

MOST_TABLES = 64  # of shared schedules and ranks that are kept


class LegsOnDevice:
    """The tables of a rank's legs on its device."""

    def __init__(self, plan: Plan, shared: SharedSchedule, rank: int, dims: tuple[int, int], where: torch.device) -> None:
        self.host, self.where = LegTables(plan, shared, rank, backward_tiles(*dims)), where
        self.tables = DeviceTables(self.host.tables, where)
        self.mask = MaskOfRank(plan.problem, shared.sharding, rank, where)
        self._some: dict[tuple[int, tuple[Head, ...]], DeviceTables] = {}

    def records(self, unit: Unit) -> int:
        return self.tables["records"] + ChainRecord.bytes() * self.host.chains[unit.number].first

    def endings(self, unit: Unit) -> int:
        return self.tables["endings"] + EndingRecord.bytes() * self.host.ends[unit.number].first

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
