"""Any boolean matrix as a mask: one for all, or one per sequence or query head. Each is kept in bits.

Planning needs which of its blocks are empty, partial or full. The elements are data of a call.
"""

from __future__ import annotations

import hashlib
import sys
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from .rules import EMPTY, FULL, PARTIAL, BlockMap, Mask, TileMap, as_array

BLOCK = 64  # rows and columns: the tiles of most kernels are multiples of it
WORD = np.dtype("<u8")  # a row of a block: bit j is column j
ALL_BITS = 2**BLOCK - 1
DIMENSIONS = "(q_len, kv_len), or what broadcasts to (batch, query heads, q_len, kv_len)"


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


class BitMatrix:
    """One matrix: which of its blocks are empty, partial or full, and eight elements per byte of those that are partial.

    `words` are the rows of partial blocks, block by block, and behind them an empty and a full block; `places` say which of
    these a block has."""

    def __init__(self, shape: tuple[int, int], blocks: NDArray[np.uint8], rows: NDArray[np.uint64] | None = None) -> None:
        """rows: (rows, blocks), 64 columns per word, zeros beyond the last. Only partial blocks need them."""
        self.shape, self.blocks = shape, blocks
        self.words, self.places = words_and_places(blocks)
        partial = blocks == PARTIAL
        if rows is not None and partial.any():
            padded = np.zeros((len(blocks) * BLOCK, rows.shape[1]), dtype=WORD)
            padded[: len(rows)] = rows
            self.words[:-2] = padded.reshape(-1, BLOCK, rows.shape[1]).transpose(0, 2, 1)[partial]

    @classmethod
    def of(cls, matrix: NDArray[np.bool_]) -> BitMatrix:
        return cls.of_rows(rows_as_words(np.packbits(matrix, axis=1, bitorder="little")), matrix.shape)

    @classmethod
    def of_rows(cls, rows: NDArray[np.uint64], shape: tuple[int, int]) -> BitMatrix:
        return cls(shape, _blocks_of(rows, shape[1]), rows)

    @classmethod
    def of_blocks(cls, kept: NDArray[np.bool_], shape: tuple[int, int]) -> BitMatrix:
        """Of blocks that are kept whole or not at all."""
        return cls(shape, np.where(kept, FULL, EMPTY).astype(np.uint8))

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.places.nbytes + self.blocks.nbytes

    @cached_property
    def digest(self) -> bytes:
        """Equal for equal matrices."""
        digest = hashlib.sha256(np.array(self.shape, dtype=np.int64).tobytes())
        digest.update(self.blocks.tobytes())
        digest.update(self.words.tobytes())
        return digest.digest()

    def keep(self, q: slice, kv: slice) -> NDArray[np.bool_]:
        """Which elements attend, of some rows and columns inside the lengths."""
        first_row, first_column = q.start // BLOCK, kv.start // BLOCK
        blocks = self.places[first_row : -(-q.stop // BLOCK), first_column : -(-kv.stop // BLOCK)]
        words = np.ascontiguousarray(self.words[blocks].transpose(0, 2, 1)).reshape(-1, blocks.shape[1])
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").view(np.bool_)
        top, left = q.start - first_row * BLOCK, kv.start - first_column * BLOCK
        kept: NDArray[np.bool_] = bits[top : top + q.stop - q.start, left : left + kv.stop - kv.start]
        return kept


def words_and_places(blocks: NDArray[np.uint8]) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """Of a pattern of blocks; no element of those that are partial is kept."""
    partial = blocks == PARTIAL
    count = int(partial.sum())
    words = np.zeros((count + 2, BLOCK), dtype=WORD)
    words[count + 1] = ALL_BITS
    places = np.where(blocks == EMPTY, count, count + 1).astype(np.int32)
    places[partial] = np.arange(count)
    return words, places


def rows_as_words(octets: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """(rows, blocks) from (rows, bytes): zeros beyond the last."""
    size = BLOCK // 8
    if octets.shape[1] % size == 0 and octets.flags.c_contiguous:
        return octets.view(WORD)
    padded = np.zeros((len(octets), -(-octets.shape[1] // size) * size), dtype=np.uint8)
    padded[:, : octets.shape[1]] = octets
    return padded.view(WORD)


def _blocks_of(rows: NDArray[np.uint64], columns: int) -> NDArray[np.uint8]:
    starts = np.arange(0, len(rows), BLOCK)
    every, some = np.bitwise_and.reduceat(rows, starts, axis=0), np.bitwise_or.reduceat(rows, starts, axis=0)
    whole = np.full(rows.shape[1], ALL_BITS, dtype=WORD)
    whole[-1] = ALL_BITS >> (-columns % BLOCK)
    return np.where(some == 0, EMPTY, np.where(every == whole, FULL, PARTIAL)).astype(np.uint8)


class BooleanMask:
    """Query i attends to key j iff `matrix[..., i, j]`. The shape is (q_len, kv_len), or broadcasts to (batch, query heads, q_len, kv_len).

    flash_attn_func takes it as `mask=`, and a boolean tensor as well. It is read and planned once: make it once if
    many calls have the same mask. It keeps its own bits, so a later change of the matrix has no effect. `nbytes` is its size.
    """

    def __init__(self, matrix: Any) -> None:
        """matrix: a boolean tensor, or an array of NumPy."""
        array = matrix.detach() if hasattr(matrix, "detach") else matrix
        on_device = getattr(array, "is_cuda", False)
        if not on_device:
            array = as_array(array, "a boolean mask")
        if str(array.dtype) not in ("bool", "torch.bool") or not 2 <= array.ndim <= 4 or 0 in array.shape:
            hint = "; of a matrix of 0 and -inf take `matrix == 0`" if "float" in str(array.dtype) else ""
            raise ValueError(
                f"a boolean mask must be boolean, not empty and of shape {DIMENSIONS};"
                f" got {array.dtype} of shape {tuple(array.shape)}{hint}"
            )
        in_bits = bits_on_device if on_device else BitMatrix.of
        self._take([[in_bits(one) for one in heads] for heads in _without_repeats(array)], tuple(array.shape))

    @classmethod
    def of_matrices(cls, matrices: list[list[BitMatrix]]) -> BooleanMask:
        """Of one matrix for each sequence and query head."""
        made = cls.__new__(cls)
        made._take(matrices, (len(matrices), len(matrices[0]), *matrices[0][0].shape))
        return made

    def _take(self, matrices: list[list[BitMatrix]], shape: tuple[int, ...]) -> None:
        distinct: dict[bytes, int] = {}
        numbers = [[distinct.setdefault(one.digest, len(distinct)) for one in heads] for heads in matrices]
        by_digest = {one.digest: one for heads in matrices for one in heads}
        self._some: dict[tuple[Any, ...], BooleanMask] = {}
        self.shape = shape
        self.matrices = tuple(by_digest[digest] for digest in distinct)
        self.numbers = np.array(numbers, dtype=np.int64)  # (sequences or 1, query heads or 1): which matrix each has

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes for matrix in self.matrices)

    @cached_property
    def has_partial_blocks(self) -> bool:
        """Whether the elements say more than the pattern."""
        return any((matrix.blocks == PARTIAL).any() for matrix in self.matrices)

    @cached_property
    def pattern(self) -> TilePattern | TileMap | PatternPerHead:
        """Which tiles are kept, for planning."""
        of_matrices = [TilePattern.of(matrix.blocks) for matrix in self.matrices]
        patterns = tuple(dict.fromkeys(of_matrices))
        if len(patterns) == 1:
            return patterns[0]
        places = np.array([patterns.index(pattern) for pattern in of_matrices])
        return PatternPerHead(patterns, places[self.numbers])

    def of(self, sequence: int, head: int) -> BitMatrix:
        """The matrix of a query head of a sequence."""
        sequences, heads = self.numbers.shape
        return self.matrices[int(self.numbers[sequence if sequences > 1 else 0, head if heads > 1 else 0])]

    def some(self, sequences: slice, heads: slice) -> BooleanMask:
        """Of some sequences and query heads. The matrices are shared. It is kept, so that what a backend keeps of it is found again."""
        numbers = self.numbers[sequences if len(self.numbers) > 1 else slice(None), heads if self.numbers.shape[1] > 1 else slice(None)]
        if numbers.shape == self.numbers.shape:
            return self
        key = numbers.shape, numbers.tobytes()
        if key not in self._some:
            made = BooleanMask.__new__(BooleanMask)
            made._some, made.matrices, made.numbers = {}, self.matrices, numbers
            made.shape = (*numbers.shape, *self.shape[-2:])
            self._some[key] = made
        return self._some[key]

    def __repr__(self) -> str:
        return f"BooleanMask(shape={self.shape}, matrices={len(self.matrices)}, nbytes={self.nbytes})"


def check_shape(shape: tuple[int, ...], needed: tuple[int, int, int, int], broadcast: int = 2) -> None:
    """Raise ValueError unless there is a matrix for each query head of each sequence. broadcast: how many dimensions may be 1."""
    sizes = (1,) * (4 - len(shape)) + tuple(shape)
    fits = (size == wanted or (size == 1 and place < broadcast) for place, (size, wanted) in enumerate(zip(sizes, needed, strict=False)))
    if not 2 <= len(shape) <= 4 or not all(fits):
        raise ValueError(
            f"a boolean mask must be {needed[2:]} (q_len, kv_len), or broadcast to {needed} (batch, query heads, q_len, kv_len);"
            f" got shape {tuple(shape)}"
        )


def _without_repeats(array: Any) -> Any:
    """(sequences or 1, heads or 1, q_len, kv_len): of a dimension that was expanded, its first. An array or a tensor."""
    leading = array[(None,) * (4 - array.ndim)]
    strides = leading.strides if isinstance(leading, np.ndarray) else leading.stride()
    return leading[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides[:2])]


def bits_on_device(matrix: Any) -> BitMatrix:
    """Of a tensor of two dimensions. Eight elements become a byte before they come to the host."""
    torch = sys.modules["torch"]  # whoever has a tensor has imported it; this room needs NumPy alone
    rows, columns = matrix.shape
    padded = matrix.new_zeros(rows, -(-columns // BLOCK) * BLOCK)
    torch.ne(matrix.view(torch.uint8), 0, out=padded[:, :columns])  # a tensor viewed as boolean may have other bytes than 0 and 1
    elements = padded.view(torch.uint8)
    octets = elements[:, ::8].clone()
    for bit in range(1, 8):
        octets |= elements[:, bit::8] << bit
    return BitMatrix.of_rows(rows_as_words(octets.cpu().numpy()), (rows, columns))
