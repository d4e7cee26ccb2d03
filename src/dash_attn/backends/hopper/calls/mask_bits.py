"""Elements of boolean masks on the device, as the kernels read them (common/mask.cuh): bits of partial tiles, and their numbers.

Which tiles are partial follows from the pattern, so a prepared call has their numbers. The bits come with each call. They are kept as
long as the mask that they are of.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....errors import Unsupported
from ....masks import BooleanMask, TileMap
from ....masks.boolean_mask import BitMatrix
from ....scheduling.problem import Problem
from ...kept import lasting, refuse_capture, refuse_capture_of, upload
from ..driver.launch import current_stream, device_index, on_device
from ..driver.parameters import MaskBitsParams, MaskParams
from .kernel_names import KernelName, flag

MOST_NUMBERS = 2**30  # a note has the number of a tile and one bit more


@dataclass(frozen=True)
class BitLayout:
    """In which order a pass reads the bits of a tile: BitLayout of planning/mask_bits.cuh."""

    q_rows: int
    kv_rows: int
    forward: bool

    @property
    def threads(self) -> int:
        return 2 * (self.q_rows if self.forward else self.kv_rows)

    @property
    def words(self) -> int:
        """Of 32 bits, in all threads."""
        return self.threads * (2 if (self.kv_rows if self.forward else self.q_rows) > 64 else 1)

    def kernel(self) -> KernelName:
        name = f"pack_mask_bits<{self.q_rows}, {self.kv_rows}, {flag(self.forward)}>"
        return KernelName("planning/mask_bits.cuh", name)


class PartialTiles:
    """The partial tiles of a problem, numbered row by row: rows of tiles are those of queries in the forward, else those of keys."""

    def __init__(self, problem: Problem, forward: bool) -> None:
        partial = problem.partial if forward else problem.partial.T
        self.count = int(partial.sum())
        self.numbers = np.where(partial, np.cumsum(partial).reshape(partial.shape) - 1, 0).astype(np.int32)
        rows, columns = np.nonzero(partial)
        self.tiles = np.stack([rows, columns] if forward else [columns, rows], axis=1).astype(np.int32)


class MaskBits:
    """Of a prepared call: gives its parameters the bits of a mask."""

    def __init__(self, problem: Problem, forward: bool, device: torch.device) -> None:
        self.layout, self.device = BitLayout(problem.tile_q, problem.tile_kv, forward), device
        self.key = (problem, forward, device)
        self.shape = (problem.batch, problem.heads * problem.group)
        found = PartialTiles(problem, forward)
        self.count, self.columns = found.count, found.numbers.shape[1]
        self.numbers = upload(found.numbers.ravel(), device)
        self.tiles = upload(found.tiles, device)
        self.layout.kernel().load(device_index(device))
        self._of_map: BooleanMask | None = None
        if isinstance(problem.mask, TileMap):  # kept as long as this is
            self._of_map = BooleanMask.of_matrices([[BitMatrix.of_blocks(problem.mask.blocks, (problem.q_len, problem.kv_len))]])
            lasting(partial(self._kept, self._of_map), device)

    def give(self, params: MaskParams, elements: BooleanMask | None) -> BitsOfMask:
        """Whoever launches holds what is returned until then."""
        elements = self._of_map or elements
        if elements is None:
            raise ValueError("a pattern of blocks says which tiles are kept; the elements come with a call: give it the BooleanMask")
        bits = self._kept(elements)
        params.tile_numbers, params.tile_bits = bits.numbers.data_ptr(), bits.memory.data_ptr()
        params.head_numbers, params.numbered_heads, params.row_tiles = bits.first_of_heads, self.shape[1], self.columns
        return bits

    def _kept(self, elements: BooleanMask) -> BitsOfMask:
        if elements.numbers.size > 1:
            refuse_capture_of(elements)
        with _lock:
            of_mask = _bits.setdefault(elements, {})
            found = of_mask.get(self.key)
            if found is None:
                found = of_mask[self.key] = BitsOfMask(self, elements)
        found.use()
        return found


class BitsOfMask:
    """The bits of all matrices that a call has, one after the other, and whose are where."""

    def __init__(self, tiles: MaskBits, elements: BooleanMask) -> None:
        refuse_capture()
        which, places = np.unique(elements.numbers, return_inverse=True)
        if len(which) * tiles.count > MOST_NUMBERS:
            raise Unsupported(
                f"backend 'hopper' takes boolean masks of at most 2^30 partial tiles; got {len(which)} matrices of {tiles.count}"
            )
        index = device_index(tiles.device)
        self.memory = torch.empty(len(which), max(1, tiles.count), tiles.layout.words, dtype=torch.int32, device=tiles.device)
        with on_device(index):
            for bits, number in zip(self.memory, which, strict=True):
                _pack(elements.matrices[number], bits, tiles, index)
        self.numbers, self.first_of_heads = tiles.numbers, 0
        if len(which) > 1:
            of_heads = np.broadcast_to(places.reshape(elements.numbers.shape) * tiles.count, tiles.shape).astype(np.int32)
            self.numbers = torch.cat([tiles.numbers, _sent(of_heads.ravel(), tiles.device)])
            self.first_of_heads = len(tiles.numbers)
        self._index, self._stream = index, int(current_stream(index))
        self._made = torch.cuda.Event()
        self._made.record(torch.cuda.current_stream(tiles.device))

    def use(self) -> None:
        """On the current stream, which may be another one than they were made on. A graph that is captured finds them made: whoever
        captures waits for the device first."""
        if int(current_stream(self._index)) == self._stream:
            return
        if not torch.cuda.is_current_stream_capturing():
            stream = torch.cuda.current_stream(self.memory.device)
            stream.wait_event(self._made)
            for memory in (self.memory, self.numbers):
                memory.record_stream(stream)


def _pack(matrix: BitMatrix, bits: Tensor, tiles: MaskBits, index: int) -> None:
    """The words are on the device as long as the kernel reads them."""
    if tiles.count == 0:
        return
    words, places = _sent(matrix.words.view(np.int64), tiles.device), _sent(matrix.places, tiles.device)
    params = MaskBitsParams(
        words=words.data_ptr(),
        places=places.data_ptr(),
        tiles=tiles.tiles.data_ptr(),
        bits=bits.data_ptr(),
        count=tiles.count,
        q_len=matrix.shape[0],
        kv_len=matrix.shape[1],
        block_columns=matrix.places.shape[1],
    )
    tiles.layout.kernel().by_thread(index, tiles.count * tiles.layout.threads, params).on(current_stream(index))


def _sent(array: NDArray[Any], device: torch.device) -> Tensor:
    """Nobody waits: pinned memory is kept until it was read."""
    return torch.from_numpy(np.ascontiguousarray(array)).pin_memory().to(device, non_blocking=True)


_lock = threading.Lock()
_bits: WeakKeyDictionary[BooleanMask, dict[Any, BitsOfMask]] = WeakKeyDictionary()
