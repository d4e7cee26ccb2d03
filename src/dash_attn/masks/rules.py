"""Which (query, key) pairs attend, at element and at tile granularity.

Every mask answers two questions: `tile_map` (which tiles are empty, partial or full, for scheduling) and `keep`
(which elements of one tile attend, for a backend that meets a partial tile). Lengths are tokens. Where the lengths
differ, the last query is aligned with the last key (bottom-right), as FlashAttention does.
"""

import reprlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

EMPTY, PARTIAL, FULL = 0, 1, 2
SHORT = reprlib.Repr()
SHORT.maxother = 100  # characters of a mask
MASKS = "Full, Causal, Window, Documents, Prefix, TileMap"  # what a call may name
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Bounds = tuple[Ints, Ints]  # first, and end


class Mask(ABC):
    """A rule for which query attends to which key.

    sides: how many keys before its own position a query attends, and how many after it; -1 means no limit on that side. None: the keys
    that it attends do not lie around its position.
    """

    sides: tuple[int, int] | None = None

    @abstractmethod
    def tile_map(self, q_len: int, kv_len: int, tile_q: int, tile_kv: int) -> NDArray[np.uint8]:
        """EMPTY, PARTIAL or FULL for each (q_tile, kv_tile). A tile that overhangs a length is at most PARTIAL."""

    @abstractmethod
    def keep(self, q: slice, kv: slice, q_len: int, kv_len: int) -> Bools:
        """Which elements attend, for the rows `q` and the columns `kv` of one tile."""

    def check(self, q_len: int, kv_len: int) -> None:  # noqa: B027 (most masks fit any lengths)
        """Raise ValueError if this mask cannot apply to these lengths."""

    def encoded(self) -> tuple[str, list[int]]:
        """A word and whole numbers, of which encoding.py makes it again: its text, and its form as arguments of a torch operator.
        torch.compile traces this, so it only looks at plain attributes."""
        raise TypeError(f"a mask that is written is one of {MASKS}; got {self!r}")

    @property
    def is_full(self) -> bool:
        return self.sides == (-1, -1)

    @property
    def is_causal(self) -> bool:
        return self.sides == (-1, 0)


class IntervalMask(Mask):
    """A mask that keeps one interval of keys per query, both ends never moving left from one query to the next."""

    @abstractmethod
    def row_bounds(self, rows: Ints, q_len: int, kv_len: int) -> Bounds:
        """First kept key and end of the kept keys of each row, before clipping to [0, kv_len]."""

    def clipped_bounds(self, rows: Ints, q_len: int, kv_len: int) -> Bounds:
        first, end = self.row_bounds(rows, q_len, kv_len)
        return np.clip(first, 0, kv_len), np.clip(end, 0, kv_len)

    def keep(self, q: slice, kv: slice, q_len: int, kv_len: int) -> Bools:
        first, end = self.clipped_bounds(np.arange(q.start, q.stop), q_len, kv_len)
        columns = np.arange(kv.start, kv.stop)
        return (columns >= first[:, None]) & (columns < end[:, None])

    def tile_map(self, q_len: int, kv_len: int, tile_q: int, tile_kv: int) -> NDArray[np.uint8]:
        self.check(q_len, kv_len)
        first, end = self.clipped_bounds(np.arange(q_len), q_len, kv_len)
        (q_start, q_stop), (kv_start, kv_stop) = _tiles(q_len, tile_q), _tiles(kv_len, tile_kv)
        # Both bounds are sorted, so the rows that touch a KV tile are one interval of rows.
        row_start = np.searchsorted(end, kv_start, side="right")
        row_stop = np.searchsorted(first, kv_stop, side="left")
        touched = np.maximum(q_start[:, None], row_start) < np.minimum(q_stop[:, None], row_stop)
        covered = (first[q_stop - 1][:, None] <= kv_start) & (end[q_start][:, None] >= kv_stop)
        return _graded(touched, covered, (q_len, kv_len), (tile_q, tile_kv))

    def __str__(self) -> str:
        word, numbers = self.encoded()
        return f"{word}:{','.join(map(str, numbers))}" if numbers else word


class Band(IntervalMask):
    """The keys that a query attends lie around its own position."""

    sides: tuple[int, int]

    @abstractmethod
    def encoded(self) -> tuple[str, list[int]]: ...

    def row_bounds(self, rows: Ints, q_len: int, kv_len: int) -> Bounds:
        left, right = self.sides
        diagonal = rows + (kv_len - q_len)
        return np.zeros_like(rows) if left < 0 else diagonal - left, np.full_like(rows, kv_len) if right < 0 else diagonal + right + 1


@dataclass(frozen=True)
class Full(Band):
    """Every query attends to every key."""

    sides = -1, -1

    def encoded(self) -> tuple[str, list[int]]:
        return "full", []


@dataclass(frozen=True)
class Causal(Band):
    """A query attends to itself and what is before it; the last query is aligned with the last key."""

    sides = -1, 0

    def encoded(self) -> tuple[str, list[int]]:
        return "causal", []


@dataclass(frozen=True)
class Window(Band):
    """A query attends to `left` keys before its own position and `right` after it; -1 means no limit on that side."""

    left: int
    right: int

    def __post_init__(self) -> None:
        for side, width in (("left", self.left), ("right", self.right)):
            if not is_whole(width) or not -1 <= width < 2**31:
                raise ValueError(f"window {side} must be a whole number >= 0 and below 2^31, or -1 for no limit; got {width!r}")
        object.__setattr__(self, "sides", (self.left, self.right))

    def encoded(self) -> tuple[str, list[int]]:
        return "window", [self.left, self.right]


@dataclass(frozen=True)
class Documents(IntervalMask):
    """Documents packed in one sequence: a query attends to its own document, causally unless `causal=False`."""

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
            needed = f"documents need as many queries as keys, the sum of the document lengths ({total})"
            raise ValueError(f"{needed}; got {q_len} queries and {kv_len} keys")

    def row_bounds(self, rows: Ints, q_len: int, kv_len: int) -> Bounds:
        ends = np.cumsum(self.lengths, dtype=np.int64)
        starts = ends - np.array(self.lengths, dtype=np.int64)
        document = np.searchsorted(ends, rows, side="right")
        return starts[document], rows + 1 if self.causal else ends[document]

    def encoded(self) -> tuple[str, list[int]]:
        return "documents" if self.causal else "documents-full", list(self.lengths)


@dataclass(frozen=True)
class Prefix(IntervalMask):
    """Prefix-LM: every query attends to the first `length` keys, and to the others causally."""

    length: int

    def __post_init__(self) -> None:
        if not is_whole(self.length) or self.length < 0:
            raise ValueError(f"prefix length must be a whole number >= 0; got {self.length!r}")

    def check(self, q_len: int, kv_len: int) -> None:
        if self.length > kv_len:
            raise ValueError(f"prefix length must be at most the number of keys, {kv_len}; got {self.length}")

    def row_bounds(self, rows: Ints, q_len: int, kv_len: int) -> Bounds:
        return np.zeros_like(rows), np.maximum(rows + (kv_len - q_len) + 1, self.length)

    def encoded(self) -> tuple[str, list[int]]:
        return "prefix", [self.length]


class BlockMap(Mask):
    """Blocks of block_q x block_kv elements, of which some are kept, some of them whole. Compared by content."""

    what = "a tile map"

    def __init__(self, blocks: NDArray[Any], full: Bools, block_q: int, block_kv: int) -> None:
        """blocks: not 0 where any element is kept; full: where all are."""
        blocks.setflags(write=False)
        self.blocks, self._full = blocks, full
        self.block_q, self.block_kv = int(block_q), int(block_kv)
        self._identity = (blocks.dtype, blocks.tobytes(), blocks.shape, self.block_q, self.block_kv)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockMap) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def check(self, q_len: int, kv_len: int) -> None:
        needed = (-(-q_len // self.block_q), -(-kv_len // self.block_kv))
        if self.blocks.shape != needed:
            raise ValueError(
                f"{self.what} for q_len={q_len}, kv_len={kv_len} with blocks of {self.block_q} x {self.block_kv} needs shape {needed};"
                f" got {self.blocks.shape}"
            )

    def tile_map(self, q_len: int, kv_len: int, tile_q: int, tile_kv: int) -> NDArray[np.uint8]:
        """Exact where no block that a tile touches is kept in part. Else such a tile counts as partial."""
        self.check(q_len, kv_len)
        (top, bottom), (left, right) = _tiles(q_len, tile_q), _tiles(kv_len, tile_kv)
        rows = top // self.block_q, -(-bottom // self.block_q)
        columns = left // self.block_kv, -(-right // self.block_kv)
        area = (rows[1] - rows[0])[:, None] * (columns[1] - columns[0])
        touched = _kept_in_blocks(self.blocks != EMPTY, rows, columns) > 0
        return _graded(touched, _kept_in_blocks(self._full, rows, columns) == area, (q_len, kv_len), (tile_q, tile_kv))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self}, block_q={self.block_q}, block_kv={self.block_kv})"


class TileMap(BlockMap):
    """Any boolean map of blocks: query i attends to key j iff `blocks[i // block_q, j // block_kv]`.

    The blocks of the mask need not be the tiles of the kernel: a tile that straddles blocks is partial.
    """

    def __init__(self, blocks: Any, block_q: int, block_kv: int) -> None:
        array = as_array(blocks, "a tile map").copy()
        if array.ndim != 2 or array.dtype != np.bool_ or 0 in array.shape:
            raise ValueError(f"a tile map must be a non-empty 2-d boolean array; got {array.dtype} of shape {array.shape}")
        for name, size in (("block_q", block_q), ("block_kv", block_kv)):
            if not is_whole(size) or size < 1:
                raise ValueError(f"{name} must be a whole number >= 1; got {size!r}")
        super().__init__(array, array, block_q, block_kv)
        self.rows, self.columns = array.shape
        self.hexadecimal = np.packbits(array).tobytes().hex()  # the blocks as text

    def keep(self, q: slice, kv: slice, q_len: int, kv_len: int) -> Bools:
        rows = np.arange(q.start, q.stop) // self.block_q
        columns = np.arange(kv.start, kv.stop) // self.block_kv
        kept: Bools = self.blocks[np.ix_(rows, columns)]
        return kept

    def encoded(self) -> tuple[str, list[int]]:
        return f"tiles:{self.hexadecimal}", [self.rows, self.columns, self.block_q, self.block_kv]

    def __str__(self) -> str:
        return f"tiles:{self.rows}x{self.columns}"


def as_array(given: Any, what: str) -> NDArray[Any]:
    """Of whatever was given. Rows of different lengths, and tensors that have no values here, are errors that name neither."""
    try:
        return np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:
        needed = f"{what} must be a dense boolean array or tensor, all rows equally long"
        raise ValueError(f"{needed}; got {type(given).__name__}: {str(error).partition('. ')[0]}") from None


def _tiles(length: int, tile: int) -> Bounds:
    """First row of each tile, and the end of its rows."""
    start = np.arange(0, length, tile)
    return start, np.minimum(start + tile, length)


def _kept_in_blocks(blocks: Bools, rows: Bounds, columns: Bounds) -> Ints:
    """How many of the blocks that each tile touches are kept."""
    kept = np.zeros((blocks.shape[0] + 1, blocks.shape[1] + 1), dtype=np.int64)
    kept[1:, 1:] = blocks.cumsum(0).cumsum(1)
    (top, bottom), (left, right) = rows, columns
    inside: Ints = kept[np.ix_(bottom, right)] - kept[np.ix_(top, right)] - kept[np.ix_(bottom, left)] + kept[np.ix_(top, left)]
    return inside


def _graded(touched: Bools, covered: Bools, lengths: tuple[int, int], tiles: tuple[int, int]) -> NDArray[np.uint8]:
    """EMPTY, PARTIAL or FULL. A tile that overhangs a length is at most PARTIAL."""
    rows, columns = (np.arange(0, length, tile) + tile <= length for length, tile in zip(lengths, tiles, strict=True))
    return np.where(touched, np.where(covered & rows[:, None] & columns, FULL, PARTIAL), EMPTY).astype(np.uint8)


def check_mask(mask: Any) -> None:
    if not isinstance(mask, Mask):
        convert = ", as dash_attn.masks.from_block_mask makes of a BlockMask" if hasattr(mask, "mask_mod") else ""
        raise TypeError(
            f"mask must be a dash_attn mask ({MASKS}); got {mask_in_words(mask)}."
            f" flash_attn_func also takes a boolean tensor or a BooleanMask{convert}; flash_attn_varlen_func a list, one mask per sequence"
        )


def mask_in_words(mask: Any) -> str:
    """What was given as a mask, for errors. It may be large."""
    if not (hasattr(mask, "dtype") and hasattr(mask, "shape")):
        return SHORT.repr(mask)
    kind = "boolean" if str(mask.dtype) in ("bool", "torch.bool") else str(mask.dtype)
    return f"a {kind} {'array' if isinstance(mask, np.ndarray) else 'tensor'} of shape {tuple(mask.shape)}"


def is_whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
