"""Which blocks of a boolean matrix are empty, partial or full: what planning needs. The elements are data of a call (boolean_mask.py)."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from .rules import FULL, PARTIAL, BlockMap, Mask, TileMap

BLOCK = 64  # rows and columns: the tiles of most kernels are multiples of it


class TilePattern(BlockMap):
    """Blocks of 64 x 64, each EMPTY, PARTIAL or FULL. A block that overhangs the lengths is full if all that it has is kept.

    Two matrices of one pattern are planned alike and have one order: a plan never looks at elements.
    """

    what = "a pattern"

    def __init__(self, blocks: Any) -> None:
        array = np.array(blocks)
        if array.ndim != 2 or array.dtype != np.uint8 or 0 in array.shape or array.max() > FULL:
            raise ValueError(f"a pattern must be a non-empty 2-d array of uint8, 0 to {FULL}; got {array.dtype} of shape {array.shape}")
        super().__init__(array, array == FULL, BLOCK, BLOCK)

    @classmethod
    def of(cls, blocks: NDArray[np.uint8]) -> TilePattern | TileMap:
        """A map of blocks, which every backend takes, where no block is partial."""
        return cls(blocks) if (blocks == PARTIAL).any() else TileMap(blocks == FULL, BLOCK, BLOCK)

    def keep(self, q: slice, kv: slice, q_len: int, kv_len: int) -> NDArray[np.bool_]:
        raise TypeError(
            f"{self!r} says which blocks are kept; its elements come with a call: give flash_attn_func the BooleanMask or the boolean"
            " tensor itself"
        )

    def __str__(self) -> str:
        partial = int((self.blocks == PARTIAL).sum())
        return f"matrix:{self.blocks.shape[0]}x{self.blocks.shape[1]} blocks, {partial} partial"


class PatternPerHead(Mask):
    """Patterns that differ between sequences or query heads. Heads of one pattern are planned together, the others apart."""

    def __init__(self, patterns: tuple[TilePattern | TileMap, ...], numbers: NDArray[np.int64]) -> None:
        """numbers: (sequences or 1, query heads or 1), which of the patterns each has; 1 means all have the same."""
        self.patterns = patterns
        self.numbers: tuple[tuple[int, ...], ...] = tuple(map(tuple, numbers.tolist()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PatternPerHead) and (self.patterns, self.numbers) == (other.patterns, other.numbers)

    def __hash__(self) -> int:
        return hash((self.patterns, self.numbers))

    def of_heads(self, sequence: int) -> tuple[int, ...]:
        """Which of the patterns each query head of a sequence has; one number: all have the same."""
        return self.numbers[sequence if len(self.numbers) > 1 else 0]

    def of(self, sequence: int, head: int) -> TilePattern | TileMap:
        """The pattern of a query head of a sequence."""
        heads = self.of_heads(sequence)
        return self.patterns[heads[head if len(heads) > 1 else 0]]

    def check(self, q_len: int, kv_len: int) -> None:
        for pattern in self.patterns:
            pattern.check(q_len, kv_len)

    def keep(self, q: slice, kv: slice, q_len: int, kv_len: int) -> NDArray[np.bool_]:
        self.tile_map(q_len, kv_len, 1, 1)

    def tile_map(self, q_len: int, kv_len: int, tile_q: int, tile_kv: int) -> NoReturn:
        raise ValueError(f"masks that differ between sequences or heads have no tile map in common: each is planned alone; got {self}")

    def __str__(self) -> str:
        return f"{len(self.patterns)} patterns of matrices, {len(self.numbers)} sequences x {len(self.numbers[0])} heads"

    def __repr__(self) -> str:
        return f"PatternPerHead({self})"
