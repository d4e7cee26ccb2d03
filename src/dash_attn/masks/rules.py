"""Which (query, key) pairs attend, at element and at tile granularity.

Every mask answers two questions: `tile_map` (which tiles are empty, partial or full, for scheduling) and `keep`
(which elements of one tile attend, for a backend that meets a partial tile). Lengths are tokens. Where the lengths
differ, the last query is aligned with the last key (bottom-right), as FlashAttention does.
"""

from __future__ import annotations

import reprlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

EMPTY, PARTIAL, FULL = 0, 1, 2


class Mask(ABC):
    """A rule for which query attends which key."""

    @abstractmethod
    def tile_map(self, q_len: int, kv_len: int, tile_q: int, tile_kv: int) -> NDArray[np.uint8]:
        """EMPTY, PARTIAL or FULL for each (q_tile, kv_tile). A tile that overhangs a length is at most PARTIAL."""

    @abstractmethod
    def keep(self, q: slice, kv: slice, q_len: int, kv_len: int) -> NDArray[np.bool_]:
        """Which elements attend, for the rows `q` and the columns `kv` of one tile."""

    def check(self, q_len: int, kv_len: int) -> None:  # noqa: B027 (most masks fit any lengths)
        """Raise ValueError if this mask cannot apply to these lengths."""

    @property
    def is_full(self) -> bool:
        return False

    @property
    def is_causal(self) -> bool:
        return False


class IntervalMask(Mask):
    """A mask that keeps one interval of keys per query, both ends never moving left from one query to the next."""

    @abstractmethod
    def row_bounds(self, rows: NDArray[np.int64], q_len: int, kv_len: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First kept key and end of the kept keys of each row, before clipping to [0, kv_len]."""

    def clipped_bounds(self, rows: NDArray[np.int64], q_len: int, kv_len: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        first, end = self.row_bounds(rows, q_len, kv_len)
        return np.clip(first, 0, kv_len), np.clip(end, 0, kv_len)

    def keep(self, q: slice, kv: slice, q_len: int, kv_len: int) -> NDArray[np.bool_]:
        first, end = self.clipped_bounds(np.arange(q.start, q.stop), q_len, kv_len)
        columns = np.arange(kv.start, kv.stop)
        return (columns >= first[:, None]) & (columns < end[:, None])

    def tile_map(self, q_len: int, kv_len: int, tile_q: int, tile_kv: int) -> NDArray[np.uint8]:
        self.check(q_len, kv_len)
        first, end = self.clipped_bounds(np.arange(q_len), q_len, kv_len)
        q_start = np.arange(0, q_len, tile_q)
        q_stop = np.minimum(q_start + tile_q, q_len)
        kv_start = np.arange(0, kv_len, tile_kv)
        kv_stop = np.minimum(kv_start + tile_kv, kv_len)
        # Both bounds are sorted, so the rows that touch a KV tile are one interval of rows.
        row_start = np.searchsorted(end, kv_start, side="right")
        row_stop = np.searchsorted(first, kv_stop, side="left")
        touched = np.maximum(q_start[:, None], row_start) < np.minimum(q_stop[:, None], row_stop)
        covered = (first[q_stop - 1][:, None] <= kv_start) & (end[q_start][:, None] >= kv_stop)
        whole = ((q_start + tile_q) <= q_len)[:, None] & ((kv_start + tile_kv) <= kv_len)
        return np.where(touched, np.where(covered & whole, FULL, PARTIAL), EMPTY).astype(np.uint8)


@dataclass(frozen=True)
class Full(IntervalMask):
    """Every query attends every key."""

    def row_bounds(self, rows: NDArray[np.int64], q_len: int, kv_len: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return np.zeros_like(rows), np.full_like(rows, kv_len)

    @property
    def is_full(self) -> bool:
        return True

    def __str__(self) -> str:
        return "full"


@dataclass(frozen=True)
class Causal(IntervalMask):
    """A query attends itself and what is before it; the last query is aligned with the last key."""

    def row_bounds(self, rows: NDArray[np.int64], q_len: int, kv_len: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return np.zeros_like(rows), rows + (kv_len - q_len) + 1

    @property
    def is_causal(self) -> bool:
        return True

    def __str__(self) -> str:
        return "causal"


@dataclass(frozen=True)
class Window(IntervalMask):
    """A query attends `left` keys before its own position and `right` after it; -1 means no limit on that side."""

    left: int
    right: int

    def __post_init__(self) -> None:
        for side, width in (("left", self.left), ("right", self.right)):
            if not is_whole(width) or not -1 <= width < 2**31:
                raise ValueError(f"window {side} must be a whole number >= 0 and below 2^31, or -1 for no limit; got {width!r}")

    def row_bounds(self, rows: NDArray[np.int64], q_len: int, kv_len: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        diagonal = rows + (kv_len - q_len)
        first = np.zeros_like(rows) if self.left < 0 else diagonal - self.left
        end = np.full_like(rows, kv_len) if self.right < 0 else diagonal + self.right + 1
        return first, end

    @property
    def is_full(self) -> bool:
        return self.left < 0 and self.right < 0

    @property
    def is_causal(self) -> bool:
        return self.left < 0 and self.right == 0

    def __str__(self) -> str:
        return f"window:{self.left},{self.right}"


@dataclass(frozen=True)
class Documents(IntervalMask):
    """Documents packed in one sequence: a query attends its own document, causally unless `causal=False`."""

    lengths: tuple[int, ...]
    causal: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.lengths, (tuple, list)):
            raise ValueError(f"document lengths must be a tuple of whole numbers >= 1; got {self.lengths!r}")
        object.__setattr__(self, "lengths", tuple(self.lengths))
        if not self.lengths or any(not is_whole(n) or n < 1 for n in self.lengths):
            raise ValueError(f"document lengths must be whole numbers >= 1, at least one; got {self.lengths!r}")

    def check(self, q_len: int, kv_len: int) -> None:
        total = sum(self.lengths)
        if q_len != kv_len or total != q_len:
            raise ValueError(f"documents need q_len == kv_len == sum of the document lengths ({total}); got q_len={q_len}, kv_len={kv_len}")

    def row_bounds(self, rows: NDArray[np.int64], q_len: int, kv_len: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        ends = np.array(list(accumulate(self.lengths)), dtype=np.int64)
        starts = ends - np.array(self.lengths, dtype=np.int64)
        document = np.searchsorted(ends, rows, side="right")
        return starts[document], rows + 1 if self.causal else ends[document]

    def __str__(self) -> str:
        return ("documents:" if self.causal else "documents-full:") + ",".join(map(str, self.lengths))


@dataclass(frozen=True)
class Prefix(IntervalMask):
    """Prefix-LM: the first `length` keys are seen by every query, the others causally."""

    length: int

    def __post_init__(self) -> None:
        if not is_whole(self.length) or self.length < 0:
            raise ValueError(f"prefix length must be a whole number >= 0; got {self.length!r}")

    def check(self, q_len: int, kv_len: int) -> None:
        if self.length > kv_len:
            raise ValueError(f"prefix length must be at most kv_len={kv_len}; got {self.length}")

    def row_bounds(self, rows: NDArray[np.int64], q_len: int, kv_len: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return np.zeros_like(rows), np.maximum(rows + (kv_len - q_len) + 1, self.length)

    def __str__(self) -> str:
        return f"prefix:{self.length}"


class TileMap(Mask):
    """Any boolean map of blocks: query i attends key j iff `blocks[i // block_q, j // block_kv]`.

    The blocks of the mask need not be the tiles of the kernel: a tile that straddles blocks is partial.
    """

    def __init__(self, blocks: Any, block_q: int, block_kv: int) -> None:
        array = np.array(blocks)
        if array.ndim != 2 or array.dtype != np.bool_ or 0 in array.shape:
            raise ValueError(f"a tile map must be a non-empty 2-d boolean array; got {array.dtype} of shape {array.shape}")
        for name, size in (("block_q", block_q), ("block_kv", block_kv)):
            if not is_whole(size) or size < 1:
                raise ValueError(f"{name} must be a whole number >= 1; got {size!r}")
        array.setflags(write=False)
        self.blocks = array
        self.block_q, self.block_kv = int(block_q), int(block_kv)
        self.rows, self.columns = array.shape
        self.hexadecimal = np.packbits(array).tobytes().hex()  # the blocks as text
        self._identity = (self.hexadecimal, array.shape, self.block_q, self.block_kv)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TileMap) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def check(self, q_len: int, kv_len: int) -> None:
        needed = (-(-q_len // self.block_q), -(-kv_len // self.block_kv))
        if self.blocks.shape != needed:
            raise ValueError(
                f"a tile map for q_len={q_len}, kv_len={kv_len} with blocks of {self.block_q} x {self.block_kv} needs shape {needed};"
                f" got {self.blocks.shape}"
            )

    def keep(self, q: slice, kv: slice, q_len: int, kv_len: int) -> NDArray[np.bool_]:
        rows = np.arange(q.start, q.stop) // self.block_q
        columns = np.arange(kv.start, kv.stop) // self.block_kv
        kept: NDArray[np.bool_] = self.blocks[np.ix_(rows, columns)]
        return kept

    def tile_map(self, q_len: int, kv_len: int, tile_q: int, tile_kv: int) -> NDArray[np.uint8]:
        self.check(q_len, kv_len)
        inside, area = kept_in_blocks(self.blocks, block_range(q_len, tile_q, self.block_q), block_range(kv_len, tile_kv, self.block_kv))
        whole = whole_tiles(q_len, tile_q)[:, None] & whole_tiles(kv_len, tile_kv)
        return np.where(inside > 0, np.where((inside == area) & whole, FULL, PARTIAL), EMPTY).astype(np.uint8)

    def __str__(self) -> str:
        return f"tiles:{self.blocks.shape[0]}x{self.blocks.shape[1]}"

    def __repr__(self) -> str:
        return f"TileMap({self}, block_q={self.block_q}, block_kv={self.block_kv})"


Range = tuple[NDArray[np.int64], NDArray[np.int64]]


def kept_in_blocks(blocks: NDArray[np.bool_], rows: Range, columns: Range) -> Range:
    """How many of the blocks that each tile touches are kept, and how many it touches."""
    kept = np.zeros((blocks.shape[0] + 1, blocks.shape[1] + 1), dtype=np.int64)
    kept[1:, 1:] = blocks.cumsum(0).cumsum(1)
    (top, bottom), (left, right) = rows, columns
    inside = kept[np.ix_(bottom, right)] - kept[np.ix_(top, right)] - kept[np.ix_(bottom, left)] + kept[np.ix_(top, left)]
    return inside, (bottom - top)[:, None] * (right - left)


def block_range(length: int, tile: int, block: int) -> Range:
    """First block and end of the blocks that each tile touches."""
    start = np.arange(0, length, tile)
    return start // block, -(-np.minimum(start + tile, length) // block)


def whole_tiles(length: int, tile: int) -> NDArray[np.bool_]:
    return np.arange(0, length, tile) + tile <= length


def check_mask(mask: Any) -> None:
    if not isinstance(mask, Mask):  # shown short: it may be a large tensor
        convert = ", as dash_attn.masks.from_block_mask makes of a BlockMask" if hasattr(mask, "mask_mod") else ""
        raise TypeError(
            f"mask must be a dash_attn mask (Full, Causal, Window, Documents, Prefix, TileMap); got {reprlib.repr(mask)}."
            f" flash_attn_func also takes a boolean tensor or a BooleanMask{convert}"
        )


def is_whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


MASK_FORMS = "full, causal, window:LEFT,RIGHT, documents:LEN,LEN,..., documents-full:LEN,LEN,..., prefix:LEN"


def parse_mask(text: str, unit: int = 1) -> Mask:
    """Read a mask as it prints. Lengths are multiplied by `unit` (tokens per KV tile, when they are given in tiles)."""
    name, _, argument = text.strip().partition(":")
    try:
        numbers = [int(word) for word in argument.split(",")] if argument else []
    except ValueError:
        raise ValueError(f"mask {text!r}: lengths must be whole numbers; masks are written {MASK_FORMS}") from None
    scaled = [n if n < 0 else n * unit for n in numbers]
    if name == "full" and not numbers:
        return Full()
    if name == "causal" and not numbers:
        return Causal()
    if name == "window" and len(numbers) == 2:
        return Window(*scaled)
    if name in ("documents", "documents-full") and numbers:
        return Documents(tuple(scaled), causal=name == "documents")
    if name == "prefix" and len(numbers) == 1:
        return Prefix(*scaled)
    raise ValueError(f"unknown mask {text!r}; masks are written {MASK_FORMS}")
