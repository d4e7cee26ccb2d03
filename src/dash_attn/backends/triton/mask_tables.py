"""What a kernel needs to know of a mask: a band by two distances, other masks by lists of tiles and by rows, blocks or bits of elements.

Of boolean matrices: lists of tiles for each, blocks of 64 x 64, and 64 elements per word of the partial ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...masks import EMPTY, FULL, PARTIAL, BooleanMask, IntervalMask, Mask, PatternPerHead, TileMap, TilePattern
from ...masks.boolean_mask import words_and_places
from ..gpus import FAR_AWAY
from ..kept import Kept, upload
from .tiles import Tile

BAND, ROWS, BLOCKS, BITS = 0, 1, 2, 3  # as in kernels/visits.py
TABLES = ("rows", "bounds", "visits", "blocks", "places", "matrices")
MOST_TABLES = 128  # that are kept on GPUs
Tables = TypeVar("Tables")
_kept: Kept[Any] = Kept(MOST_TABLES)
_of_masks: WeakKeyDictionary[BooleanMask, dict[Any, Any]] = WeakKeyDictionary()  # tables live as long as their mask


def kept_on(device: torch.device, key: Any, make: Callable[[], Tables]) -> Tables:
    """What was made before for this key, if it is on a GPU. Tables of a captured graph stay for good."""
    if device.type != "cuda":
        return make()
    found: Tables = _kept.find((device, key), make)
    return found


def kept_with(elements: BooleanMask, key: Any, make: Callable[[], Tables]) -> Tables:
    """What was made of a mask before, for this key."""
    found: dict[Any, Tables] = _of_masks.setdefault(elements, {})
    if key not in found:
        found[key] = make()
    return found[key]


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
        if self.mask.sides is not None:
            return MaskTables(BAND, *distances(self.mask.sides))
        found = self._found(tile, by_keys)
        if self.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            for memory in found.memory:  # is not used again before this stream is through with it
                memory.record_stream(torch.cuda.current_stream(self.device))
        return found

    def _found(self, tile: Tile, by_keys: bool) -> MaskTables:
        shape = self.lengths, (tile.q_rows, tile.kv_rows), by_keys, self.device
        if self.elements is None:
            return kept_on(self.device, (self.mask, *shape), lambda: self._make(tile, by_keys))
        return kept_with(self.elements, shape, lambda: self._make(tile, by_keys))

    def _make(self, tile: Tile, by_keys: bool) -> MaskTables:
        """Of boolean matrices, lists of one stand behind those of another."""
        mask, device = self.mask, self.device
        found = self._matrices(mask) if isinstance(mask, (TilePattern, PatternPerHead)) else None
        maps = [one.tile_map(*self.lengths, tile.q_rows, tile.kv_rows) for one in ((mask,) if found is None else found.patterns)]
        bounds, visits = visit_lists(np.concatenate([tile_map.T if by_keys else tile_map for tile_map in maps]))
        lists: dict[str, Any] = {"bounds": upload(bounds, device), "visits": upload(visits, device)}
        if found is not None:
            return MaskTables(BITS, **found.arguments(), **lists)
        if isinstance(mask, TileMap):
            sizes = {"block_q": mask.block_q, "block_kv": mask.block_kv, "block_columns": mask.blocks.shape[1]}
            return MaskTables(BLOCKS, blocks=upload(mask.blocks.astype(np.uint8), device), **sizes, **lists)
        assert isinstance(mask, IntervalMask)
        rows = np.stack(mask.clipped_bounds(np.arange(self.lengths[0]), *self.lengths), axis=1)
        return MaskTables(ROWS, rows=upload(rows.astype(np.int32), device), **lists)

    def _matrices(self, mask: TilePattern | PatternPerHead) -> Matrices:
        """Without elements: of a mask that has no partial blocks, or that is only explained."""
        device, elements = self.device, self.elements
        if elements is not None:
            tables = ((matrix.blocks, matrix.words, matrix.places) for matrix in elements.matrices)
            return kept_with(elements, device, lambda: Matrices.of(tables, elements.numbers, device))
        patterns, numbers = (mask.patterns, np.array(mask.numbers)) if isinstance(mask, PatternPerHead) else ((mask,), np.zeros((1, 1)))
        all_blocks = (one.blocks if isinstance(one, TilePattern) else np.where(one.blocks, FULL, EMPTY) for one in patterns)
        of_patterns = ((blocks, *words_and_places(blocks)) for blocks in all_blocks)
        return kept_on(device, mask, lambda: Matrices.of(of_patterns, numbers, device))


def distances(sides: tuple[int, int]) -> tuple[int, int]:
    """How far a query sees to the left and to the right of its own position."""
    left, right = (FAR_AWAY if side < 0 else min(int(side), FAR_AWAY) for side in sides)
    return left, right


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


@dataclass(frozen=True, eq=False)
class Matrices:
    """Of a call. Words of all matrices stand behind each other; `places` count in blocks of 64 words."""

    patterns: tuple[TilePattern | TileMap, ...]  # one per matrix
    words: Tensor
    places: Tensor  # (matrices, blocks)
    numbers: Tensor  # (sequences or 1, query heads or 1): which matrix each has

    @classmethod
    def of(cls, tables: Iterable[tuple[NDArray[Any], ...]], numbers: NDArray[Any], device: torch.device) -> Matrices:
        """tables: blocks, words and places of each matrix."""
        all_blocks, all_words, all_places = zip(*tables, strict=True)
        begins = np.cumsum([0, *map(len, all_words[:-1])])
        places = np.stack([(begin + places).ravel() for begin, places in zip(begins, all_places, strict=True)])
        uploaded = np.concatenate(all_words).view(np.int64), places.astype(np.int32), numbers.astype(np.int32)
        return cls(tuple(map(TilePattern.of, all_blocks)), *(upload(table, device) for table in uploaded))

    def arguments(self) -> dict[str, Any]:
        sequences, heads = self.numbers.shape
        return {
            **{"blocks": self.words, "places": self.places, "matrices": self.numbers},
            "block_columns": self.patterns[0].blocks.shape[1],
            "matrix_batch": heads if sequences > 1 else 0,
            "matrix_head": 1 if heads > 1 else 0,
            "matrix_blocks": self.places.shape[1],
        }
