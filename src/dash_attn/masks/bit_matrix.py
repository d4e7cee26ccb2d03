"""One boolean matrix in bits: which of its blocks are empty, partial or full, and eight elements per byte of those that are partial."""

from __future__ import annotations

import hashlib
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .rules import EMPTY, FULL, PARTIAL
from .tile_pattern import BLOCK

WORD = np.dtype("<u8")  # a row of a block: bit j is column j
ALL_BITS = 2**BLOCK - 1


class BitMatrix:
    """`words` are the rows of partial blocks, block by block, and behind them an empty and a full block; `places` say which of
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


def rows_as_words(packed: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """(rows, blocks) from (rows, bytes): zeros beyond the last."""
    size = BLOCK // 8
    if packed.shape[1] % size == 0 and packed.flags.c_contiguous:
        return packed.view(WORD)
    padded = np.zeros((len(packed), -(-packed.shape[1] // size) * size), dtype=np.uint8)
    padded[:, : packed.shape[1]] = packed
    return padded.view(WORD)


def _blocks_of(rows: NDArray[np.uint64], columns: int) -> NDArray[np.uint8]:
    starts = np.arange(0, len(rows), BLOCK)
    every, some = np.bitwise_and.reduceat(rows, starts, axis=0), np.bitwise_or.reduceat(rows, starts, axis=0)
    whole = np.full(rows.shape[1], ALL_BITS, dtype=WORD)
    whole[-1] = ALL_BITS >> (-columns % BLOCK)
    return np.where(some == 0, EMPTY, np.where(every == whole, FULL, PARTIAL)).astype(np.uint8)
