"""Tile sizes and shared memory of the kernels, by head dim. The .cuh files say the same; a test compares them."""

from __future__ import annotations

from dataclasses import dataclass

# Head dims the kernels are written for. Others run on the next larger one: the TMA unit fills in zeros.
KERNEL_DIMS = (64, 96, 128, 192, 256)
THREADS, HELPER_THREADS = 384, 256


def helper_blocks(threads: int) -> int:
    """Of a helper kernel with that many threads."""
    return -(-threads // HELPER_THREADS)


def kernel_dim(*dims: int) -> int:
    """The kernel that serves these head dims (of q and k, and of v)."""
    return next(dim for dim in KERNEL_DIMS if dim >= max(dims))


@dataclass(frozen=True)
class BackwardTiles:
    """Rows of a Q tile and of a KV tile, columns of a dQ tile, shared memory."""

    q_rows: int
    kv_rows: int
    columns: int
    shared_bytes: int


@dataclass(frozen=True)
class ForwardTiles:
    kv_rows: int
    shared_bytes: int


def backward_tiles(dim: int) -> BackwardTiles:
    """As BackwardConfig: K, V, Q and dO, scores, dQ staging, row statistics, notes, barriers."""
    columns = -(-dim // 64) * 64
    if dim > 128:  # WideConfig
        rows, do_stages = 64, 2 if dim == 192 else 1
        tiles = (2 + 2 + do_stages) * rows * columns * 2 + 4 * rows * rows * 2 + 2 * rows * 64 * 4
        return BackwardTiles(rows, rows, columns, tiles + (2 + do_stages) * rows * 4 + _NOTES)
    rows = 128 if dim == 64 else 64
    tiles = 2 * 128 * columns * 2 + 2 * (2 * rows * columns * 2 + rows * 128 * 2 + rows * columns * 4)
    return BackwardTiles(rows, 128, columns, tiles + 4 * rows * 4 + _NOTES)


_NOTES = 8 * 16 + 2 * 48 + 352  # step notes, chain notes, barriers


def forward_tiles(dim: int, consumers: int) -> ForwardTiles:
    """As ForwardConfig: Q (twice, and the output, up to head dim 128), two stages of K and V, notes, barriers."""
    columns = -(-dim // 64) * 64
    kv_rows = 128 if dim <= 128 else 112 if dim == 192 else 80
    q_bytes = consumers * 64 * columns * 2
    tiles = (3 if dim <= 128 else 1) * q_bytes + 4 * kv_rows * columns * 2
    return ForwardTiles(kv_rows, tiles + 2 * 32 + 16 + 128)
