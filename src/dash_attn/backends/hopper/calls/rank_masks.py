"""Masks of rows that are a part of a sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ....masks import Causal, Full, IntervalMask, Mask, Window
from ....scheduling.problem import Problem
from ....scheduling.ranks.sharding import Sharding
from ..driver.parameters import MaskParams
from .tables import DeviceTables, band_of


def check_mask(mask: Mask) -> None:
    """Raise where the kernels cannot mask some rows of a sequence."""
    if not isinstance(mask, IntervalMask):
        raise NotImplementedError(
            f"backend 'hopper' shares sequences between ranks with masks that keep one interval of keys per query; got {mask}, which"
            " one rank, and backend 'cpu' on any number of them, can do"
        )


@dataclass(frozen=True)
class RowsOfMask(IntervalMask):
    """Queries from `start` on of a sequence of `length` rows, on all its keys."""

    mask: IntervalMask
    start: int
    length: int

    def row_bounds(self, rows: NDArray[np.int64], q_len: int, kv_len: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return self.mask.row_bounds(rows + self.start, self.length, self.length)

    def __str__(self) -> str:
        return f"{self.mask} from row {self.start} of {self.length} on"


def mask_of_rows(mask: Mask, rows: range, length: int) -> tuple[Mask, int]:
    """The mask of some queries of a sequence, and how many keys it is for.

    The last query of a band is aligned with the last key of a call. A key that no row attends changes no bit, so the keys may end
    anywhere behind the last one that does.
    """
    if isinstance(mask, Full):
        return mask, length
    if isinstance(mask, Causal):
        return mask, rows.stop
    if not isinstance(mask, Window):
        assert isinstance(mask, IntervalMask)
        return RowsOfMask(mask, rows.start, length), length
    keys = length if mask.right < 0 else min(length, rows.stop + mask.right)
    ahead = keys - rows.stop
    left, right = (-1 if mask.left < 0 else mask.left + ahead), (-1 if mask.right < 0 else mask.right - ahead)
    return Window(left, right), keys


class MaskOfRank:
    """What the backward kernels need to mask the rows of a rank, which lie end to end."""

    def __init__(self, problem: Problem, sharding: Sharding, rank: int, where: torch.device) -> None:
        mask, rows = problem.mask, sharding.rows_of(rank).astype(np.int64)
        self.params = MaskParams(q_len=len(rows), kv_len=problem.kv_len)
        if isinstance(mask, (Full, Causal, Window)):
            self.params.band_right, self.params.band_width = band_of(mask)
            return
        assert isinstance(mask, IntervalMask)
        bounds = np.stack(mask.clipped_bounds(rows, problem.q_len, problem.kv_len), axis=1)
        self._memory = DeviceTables({"rows": bounds}, where)
        self.params.rows = self._memory["rows"]
