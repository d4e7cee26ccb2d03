"""What a kernel needs to know of a mask: a band by two distances, other masks by lists of tiles and by rows, blocks or bits of elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...masks import EMPTY, FULL, PARTIAL, BooleanMask, Causal, Full, IntervalMask, Mask, PatternPerHead, TileMap, TilePattern, Window
from ..kept import upload
from .boolean_tables import Boolean, kept_with, matrices_of
from .kept_tables import kept_on
from .support import is_band
from .tiles import Tile

BAND, ROWS, BLOCKS, BITS = 0, 1, 2, 3  # as in kernels/visits.py
FAR_AWAY = 2**29  # farther than any two tokens are apart
TABLES = ("rows", "bounds", "visits", "blocks", "places", "matrices")


@dataclass(frozen=True, eq=False)
class MaskTables:
    """Arguments of the kernels. `bounds` and `visits` say what each tile visits, the other tables which elements attend."""

    kind: int
    left: int = 0
    right: int = 0
    rows: Tensor | None = None  # (queries, 2): first key and end of the keys
    bounds: Tensor | None = None  # (matrices, tiles, 4)
    visits: Tensor | None = None
    blocks: Tensor | None = None  # of a boolean matrix: words
    places: Tensor | None = None
    matrices: Tensor | None = None
    block_q: int = 1
    block_kv: int = 1
    block_columns: int = 1
    matrix_batch: int = 0
    matrix_head: int = 0
    matrix_blocks: int = 0

    def arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "kind"}

    @property
    def memory(self) -> list[Tensor]:
        return [table for table in (getattr(self, name) for name in TABLES) if table is not None]


@dataclass(frozen=True, eq=False)
class Masked:
    """The mask of a call, and the elements of a boolean one."""

    mask: Mask
    lengths: tuple[int, int]
    device: torch.device
    elements: BooleanMask | None = None

    def tables(self, tile: Tile, by_keys: bool) -> MaskTables:
        """by_keys: of a pass whose programs own KV tiles. Packed sequences have bands only, which need no lengths."""
        if is_band(self.mask):
            assert isinstance(self.mask, (Full, Causal, Window))
            return MaskTables(BAND, *distances(self.mask))
        found = self._found(tile, by_keys)
        if self.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            for memory in found.memory:  # is not used again before this stream is through with it
                memory.record_stream(torch.cuda.current_stream(self.device))
        return found

    def _found(self, tile: Tile, by_keys: bool) -> MaskTables:
        shape = self.lengths, (tile.q_rows, tile.kv_rows), by_keys, self.device
        if self.elements is None:
            return kept_on(self.device, (self.mask, *shape), lambda: _make(self.mask, *shape))
        return kept_with(self.elements, shape, lambda: _make(self.mask, *shape, self.elements))


def distances(mask: Full | Causal | Window) -> tuple[int, int]:
    """How far a query sees to the left and to the right of its own position."""
    left = mask.left if isinstance(mask, Window) else -1
    right = mask.right if isinstance(mask, Window) else 0 if isinstance(mask, Causal) else -1
    return tuple(FAR_AWAY if side < 0 else min(int(side), FAR_AWAY) for side in (left, right))  # type: ignore[return-value]


def _make(
    mask: Mask,
    lengths: tuple[int, int],
    sizes: tuple[int, int],
    by_keys: bool,
    device: torch.device,
    elements: BooleanMask | None = None,
) -> MaskTables:
    if isinstance(mask, (TilePattern, PatternPerHead)):
        return _of_matrices(mask, (lengths, sizes, by_keys), device, elements)
    tile_map = mask.tile_map(*lengths, *sizes)
    bounds, visits = visit_lists(tile_map.T if by_keys else tile_map)
    lists: dict[str, Any] = {"bounds": upload(bounds, device), "visits": upload(visits, device)}
    if isinstance(mask, TileMap):
        blocks = upload(mask.blocks.astype(np.uint8), device)
        return MaskTables(BLOCKS, blocks=blocks, block_q=mask.block_q, block_kv=mask.block_kv, block_columns=mask.blocks.shape[1], **lists)
    assert isinstance(mask, IntervalMask)
    rows = np.stack(mask.clipped_bounds(np.arange(lengths[0]), *lengths), axis=1)
    return MaskTables(ROWS, rows=upload(rows.astype(np.int32), device), **lists)


def _of_matrices(mask: Boolean, shape: tuple[Any, ...], device: torch.device, elements: BooleanMask | None) -> MaskTables:
    """Lists of one matrix behind those of another, and bits."""
    lengths, sizes, by_keys = shape
    found = matrices_of(mask, elements, device)
    maps = [pattern.tile_map(*lengths, *sizes) for pattern in found.patterns]
    bounds, visits = visit_lists(np.concatenate([tile_map.T if by_keys else tile_map for tile_map in maps]))
    return MaskTables(BITS, bounds=upload(bounds, device), visits=upload(visits, device), **found.arguments())


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
