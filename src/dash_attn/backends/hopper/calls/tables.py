"""Plans and masks on the device: uploaded once, then shared by every call that needs them."""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....masks import IntervalMask, Mask, TileMap, TilePattern
from ....masks.boolean_mask import BLOCK
from ....scheduling.plan import Plan, visit_tables
from ....scheduling.problem import Problem
from ....scheduling.schedule import Placement
from ...gpus import FAR_AWAY
from ...kept import upload
from ..driver.parameters import MaskParams, Pair, PlanTables, VisitTables

ALIGNMENT = 4  # int32s: the kernel reads runs as 16-byte vectors


class DeviceTables:
    """Arrays laid end to end in one device tensor."""

    def __init__(self, arrays: dict[str, NDArray[Any]], device: torch.device) -> None:
        self._places: dict[str, slice] = {}
        parts, total = [], 0
        for name, array in arrays.items():
            flat = np.ascontiguousarray(array, dtype=np.int32).ravel()
            padded = np.zeros(-(-max(1, flat.size) // ALIGNMENT) * ALIGNMENT, dtype=np.int32)
            padded[: flat.size] = flat
            self._places[name] = slice(total, total + flat.size)
            parts.append(padded)
            total += padded.size
        self.memory = upload(np.concatenate(parts), device)

    def __getitem__(self, name: str) -> int:
        return int(self.memory.data_ptr() + 4 * self._places[name].start)

    def copy_of(self, name: str) -> Tensor:
        """For kernels that change it."""
        return self.memory[self._places[name]].clone()


class PlanOnDevice:
    """A plan's tables and the parameters that point to them."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        placement = plan.placement
        arrays = {name: getattr(plan, name) for name in ("starts", "chain_runs", "chain_steps", "runs", "entries")}
        arrays["segments"] = np.cumsum([0, *placement.segments])
        self.tables = DeviceTables({**arrays, "q_turns": plan.turns_per_q_tile}, device)
        self.params = PlanTables(
            **{name: self.tables[name] for name in arrays},
            has_gangs=int(plan.gang > 1),
            last_member_first=Pair(*map(int, plan.last_member_first)),
            **placement_fields(placement, plan.problem),
        )  # how groups are split depends on the tiles of a call, which adds it


def placement_fields(placement: Placement, problem: Problem) -> dict[str, Any]:
    """Of PlanTables: what decides which chain a ticket starts, beside `starts` and `segments`."""
    of_kind = placement.heads_of_kinds(problem)
    kinds, kv_heads, offset = len(of_kind), problem.heads, problem.head_offset
    counts = [len(h) for h in of_kind] + [0] * (2 - kinds)
    firsts = [(kind + offset) % 2 for kind in range(2)]
    more = kinds == 2 and problem.parts % 2  # whether groups have one part more of one kind than of the other
    return {
        "kinds": kinds,
        "kv_tiles": problem.kv_tiles,
        "lanes": placement.lanes,
        "tickets": problem.chains,
        "rounds": placement.rounds([problem.batch * len(h) for h in of_kind]),
        "instances": Pair(*(problem.batch * n for n in counts)),
        "kv_heads": kv_heads,
        "groups": problem.batch * kv_heads,
        "groups_with_more": Pair(*((kv_heads + 1 - first) // 2 if more else 0 for first in firsts)),
        "first_with_more": Pair(*firsts),
    }


class VisitsOnDevice:
    """The forward's tables and the parameters that point to them."""

    def __init__(self, problem: Problem, device: torch.device) -> None:
        tables = visit_tables(problem)
        names = ("q_order", "first_runs", "runs", "visits")
        self.tables = DeviceTables({name: getattr(tables, name) for name in names}, device)
        self.params = VisitTables(*(self.tables[name] for name in names))
        self.places = len(tables.q_order)


def mask_kind(mask: Mask) -> str:
    """How a kernel masks the elements of partial tiles: by a band, by row bounds, by blocks or by bits of their own."""
    if mask.sides is not None:
        return "Band"
    for kind, name in ((IntervalMask, "Rows"), (TileMap, "Blocks"), (TilePattern, "Bits")):
        if isinstance(mask, kind):
            return name
    raise NotImplementedError(f"the Hopper backend has no element mask for {type(mask).__name__}")


def masks_by_bits(problem: Problem) -> bool:
    """Boolean matrices with partial blocks; and without, where tiles are no multiples of blocks: look-ups of blocks would take longer."""
    mask = problem.mask
    is_matrix = isinstance(mask, TileMap) and (mask.block_q, mask.block_kv) == (BLOCK, BLOCK)
    return isinstance(mask, TilePattern) or (is_matrix and bool(problem.partial.any()))


def kind_of(problem: Problem) -> str:
    """As mask_kind, of dense tensors."""
    return "Bits" if masks_by_bits(problem) else mask_kind(problem.mask)


class MaskOnDevice:
    """What a kernel needs to mask the elements of partial tiles. Bits come with a call (mask_bits.py). rows: of which there are queries, if
    not of all."""

    def __init__(self, mask: Mask, q_len: int, kv_len: int, device: torch.device, rows: NDArray[np.int64] | None = None) -> None:
        self.kind = mask_kind(mask)
        self.params = MaskParams(q_len=q_len if rows is None else len(rows), kv_len=kv_len)
        if mask.sides is not None:
            self.params.band_right, self.params.band_width = band_of(mask.sides)
        elif isinstance(mask, TileMap):
            self._blocks = upload(mask.blocks.astype(np.uint8), device)
            self.params.blocks = self._blocks.data_ptr()
            self.params.block_q, self.params.block_kv = mask.block_q, mask.block_kv
            self.params.block_columns = mask.blocks.shape[1]
        elif isinstance(mask, IntervalMask):
            bounds = np.stack(mask.clipped_bounds(np.arange(q_len) if rows is None else rows, q_len, kv_len), axis=1)
            self._memory = DeviceTables({"rows": bounds}, device)
            self.params.rows = self._memory["rows"]


def band_of(sides: tuple[int, int]) -> tuple[int, int]:
    """(band_right, band_width) of common/mask.cuh: the same for sequences of all lengths."""
    left, right = sides
    ahead = FAR_AWAY if right < 0 else min(right, FAR_AWAY)
    return ahead, 2 * FAR_AWAY - 1 if left < 0 else min(left, FAR_AWAY) + ahead


plan_on_device = lru_cache(maxsize=64)(PlanOnDevice)
visits_on_device = lru_cache(maxsize=64)(VisitsOnDevice)
mask_on_device = lru_cache(maxsize=64)(MaskOnDevice)
