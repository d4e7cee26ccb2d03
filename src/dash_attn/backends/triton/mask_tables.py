"""What a kernel needs to know of a mask: a band by two distances, other masks by lists of tiles and by rows or blocks of elements."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...masks import EMPTY, FULL, PARTIAL, Causal, Full, IntervalMask, Mask, TileMap, Window
from .support import is_band
from .tiles import Tile

BAND, ROWS, BLOCKS = 0, 1, 2  # as in kernels/visits.py
FAR_AWAY = 2**29  # farther than any two tokens are apart


@dataclass(frozen=True, eq=False)
class MaskTables:
    """Arguments of the kernels. `bounds` and `visits` say what each tile visits, `rows` and `blocks` which elements attend."""

    kind: int
    left: int = 0
    right: int = 0
    rows: Tensor | None = None  # (queries, 2): first key and end of the keys
    bounds: Tensor | None = None  # (tiles, 4)
    visits: Tensor | None = None
    blocks: Tensor | None = None
    block_q: int = 1
    block_kv: int = 1
    block_columns: int = 1

    def arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "kind"}

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for x in (self.rows, self.bounds, self.visits, self.blocks) if x is not None)


def mask_tables(mask: Mask, lengths: tuple[int, int], tile: Tile, by_keys: bool, device: torch.device) -> MaskTables:
    """by_keys: of a pass whose programs own KV tiles. Packed sequences have bands only, which need no lengths."""
    if is_band(mask):
        assert isinstance(mask, (Full, Causal, Window))
        return MaskTables(BAND, *distances(mask))
    if device.type != "cuda":
        return _make(mask, lengths, (tile.q_rows, tile.kv_rows), by_keys, device)
    tables = _kept(mask, lengths, (tile.q_rows, tile.kv_rows), by_keys, device)
    if not torch.cuda.is_current_stream_capturing():  # its memory is not used again before this stream is through with it
        for memory in (tables.rows, tables.bounds, tables.visits, tables.blocks):
            if memory is not None:
                memory.record_stream(torch.cuda.current_stream(device))
    return tables


def distances(mask: Full | Causal | Window) -> tuple[int, int]:
    """How far a query sees to the left and to the right of its own position."""
    left = mask.left if isinstance(mask, Window) else -1
    right = mask.right if isinstance(mask, Window) else 0 if isinstance(mask, Causal) else -1
    return tuple(FAR_AWAY if side < 0 else min(int(side), FAR_AWAY) for side in (left, right))  # type: ignore[return-value]


def _make(mask: Mask, lengths: tuple[int, int], sizes: tuple[int, int], by_keys: bool, device: torch.device) -> MaskTables:
    tile_map = mask.tile_map(*lengths, *sizes)
    bounds, visits = visit_lists(tile_map.T if by_keys else tile_map)
    lists: dict[str, Any] = {"bounds": upload(bounds, device), "visits": upload(visits, device)}
    if isinstance(mask, TileMap):
        blocks = upload(mask.blocks.astype(np.uint8), device)
        return MaskTables(BLOCKS, blocks=blocks, block_q=mask.block_q, block_kv=mask.block_kv, block_columns=mask.blocks.shape[1], **lists)
    assert isinstance(mask, IntervalMask)
    rows = np.stack(mask.clipped_bounds(np.arange(lengths[0]), *lengths), axis=1)
    return MaskTables(ROWS, rows=upload(rows.astype(np.int32), device), **lists)


_kept = lru_cache(maxsize=64)(_make)


def visit_lists(tile_map: NDArray[np.uint8]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Of each row of a tile map: where its list begins, where its full tiles begin and end (twice: nothing partial comes after them);
    and the lists, partial tiles before full ones, each upward."""
    turn = np.where(tile_map == PARTIAL, 0, np.where(tile_map == FULL, 1, 2))
    order = np.argsort(turn, axis=1, kind="stable")
    counts = (tile_map != EMPTY).sum(1)
    ends = np.cumsum(counts)
    begins = ends - counts
    full_begins = begins + (tile_map == PARTIAL).sum(1)
    listed = order[np.arange(tile_map.shape[1]) < counts[:, None]]
    bounds = np.stack([begins, full_begins, ends, ends], axis=1)
    return bounds.astype(np.int32), (listed if listed.size else np.zeros(1)).astype(np.int32)


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """Once for each mask and shape; a captured graph cannot copy from the host."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("dash-attn: the first call with this mask and shape uploads tables, which a CUDA graph cannot: make it before")
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
