"""Tile sizes and shared memory of the kernels, by head dim. The .cuh files say the same; a test compares them."""

from dataclasses import dataclass

# Head dims the kernels are written for. Others run on the next larger one: the TMA unit fills in zeros.
KERNEL_DIMS = (64, 96, 128, 192, 256)
# ... of q and k, and of v, in the backward: keys of 192 with values up to 128 (DeepSeek) have a kernel of their own.
BACKWARD_DIMS = (*((dim, dim) for dim in KERNEL_DIMS), (192, 128))
# ... in the forward, where 80 columns have one, too. Rows of tiles are those of KERNEL_DIMS, and so are the bits.
FORWARD_DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
THREADS, HELPER_THREADS = 384, 256
# Head dim 64 has room for three consumers, which run faster per element but cover short and masked sequences worse.
# Consumers: time per element, relative.
CONSUMER_CHOICES = {64: {2: 1.1, 3: 1.0}, **{dim: {2: 1.0} for dim in KERNEL_DIMS[1:]}}


def helper_blocks(threads: int) -> int:
    """Of a helper kernel with that many threads."""
    return -(-threads // HELPER_THREADS)


def threads_per_row(v_dim: int) -> int:
    """Threads that sum a row of dO and O in the preprocess, 8 elements each: a power of two."""
    return 8 if v_dim == 64 else 16 if v_dim <= 128 else 32


def kernel_dim(*dims: int) -> int:
    """The kernel that serves these head dims (of q and k, and of v)."""
    return next(dim for dim in KERNEL_DIMS if dim >= max(dims))


def forward_dims(q_dim: int, v_dim: int) -> tuple[int, int]:
    """The forward kernel that serves these head dims, without dropout and ALiBi, whose kernels are those of KERNEL_DIMS."""
    return next((dim, v) for dim, v in FORWARD_DIMS if dim >= q_dim and v >= v_dim)


def backward_dims(q_dim: int, v_dim: int) -> tuple[int, int]:
    """The backward kernel that serves these head dims."""
    dim = kernel_dim(q_dim, v_dim)
    return dim, (128 if (dim, 128) in BACKWARD_DIMS and v_dim <= 128 else dim)


@dataclass(frozen=True)
class BackwardTiles:
    """Rows of a Q tile and of a KV tile, columns of a dQ tile, shared memory."""

    q_rows: int
    kv_rows: int
    columns: int
    shared_bytes: int
    sum_pieces: int  # in which a chain hands on dK and dV, where parts of a group sum them


@dataclass(frozen=True)
class ForwardTiles:
    kv_rows: int
    shared_bytes: int


def backward_tiles(dim: int, v_dim: int | None = None) -> BackwardTiles:
    """As BackwardConfig: K, V, Q and dO, scores, dQ staging, row statistics, notes, barriers. `v_dim`: of v, if not as of q and k."""
    columns, v_dim = -(-dim // 64) * 64, dim if v_dim is None else v_dim
    if (dim, v_dim) not in BACKWARD_DIMS:
        raise ValueError(f"no backward kernel has head dims {dim} (q and k) and {v_dim} (v); there are {BACKWARD_DIMS}")
    if v_dim != dim:
        return _tiles_of_narrow_values(columns, v_dim)
    if dim > 128:  # WideConfig
        rows, do_stages = 64, 2 if dim == 192 else 1
        tiles = (2 + 2 + do_stages) * rows * columns * 2 + 4 * rows * rows * 2 + 2 * rows * 64 * 4
        return BackwardTiles(rows, rows, columns, tiles + (2 + do_stages) * rows * 4 + _NOTES, sum_pieces=2)
    rows = 128 if dim == 64 else 64
    tiles = 2 * 128 * columns * 2 + 2 * (2 * rows * columns * 2 + rows * 128 * 2 + rows * columns * 4)
    return BackwardTiles(rows, 128, columns, tiles + 4 * rows * 4 + _NOTES, sum_pieces=4)


def _tiles_of_narrow_values(columns: int, v_columns: int) -> BackwardTiles:
    """TallConfig beyond head dim 128: one stage of dO and of dQ."""
    rows = 64
    tiles = 128 * (columns + v_columns) * 2 + 2 * rows * columns * 2 + rows * v_columns * 2 + 2 * rows * 128 * 2 + rows * columns * 4
    return BackwardTiles(rows, 128, columns, tiles + 3 * rows * 4 + _NOTES, sum_pieces=4)


_NOTES = 8 * 16 + 2 * 64 + 352  # step notes, chain notes, barriers


def forward_tiles(dim: int, consumers: int, v_dim: int = 0) -> ForwardTiles:
    """As ForwardConfig: Q (twice up to head dim 128), two stages of K and V, the output (unless it leaves over Q), notes, barriers.

    v_dim 0: as dim.
    """
    columns, v_columns = (-(-width // 64) * 64 for width in (dim, v_dim or dim))
    kv_rows = 128 if dim <= 128 else 112 if dim == 192 else 80
    q_bytes = consumers * 64 * columns * 2
    out_bytes = consumers * 64 * v_columns * 2 if v_columns <= 128 else 0
    tiles = (2 if dim <= 128 else 1) * q_bytes + 2 * kv_rows * (columns + v_columns) * 2 + out_bytes
    return ForwardTiles(kv_rows, tiles + 2 * 32 + 16 + 128)


DECODE_ROWS = 64  # of a unit: queries of all query heads of a group
DECODE_THREADS = 160
CLUSTER_ROWS, CLUSTER_THREADS = 8, 512
# Which clusters serve units: head dim, columns of V that a CTA owns (so dim / columns CTAs are a cluster), up to how many units.
CLUSTERS = ((64, 16, 30), (64, 32, 66), (128, 16, 15), (128, 32, 30), (128, 64, 66))


def decode_tiles(dim: int) -> ForwardTiles:
    """As DecodeConfig: Q, a ring of slots for tiles of K and V, barriers. Rows are those of the forward, so the bits are."""
    columns, kv_rows = -(-dim // 64) * 64, forward_tiles(dim, 2).kv_rows
    slots = 6 if dim <= 64 else 3 if dim <= 128 else 4
    return ForwardTiles(kv_rows, (DECODE_ROWS + slots * kv_rows) * columns * 2 + 128)


def cluster_tiles(dim: int, columns: int) -> ForwardTiles:
    """As ClusterConfig: Q, slots of K and V, messages and drafts of them, maxima, exponentials, barriers; in units of 128 bytes."""
    kv_rows, ctas = forward_tiles(dim, 2).kv_rows, dim // columns
    k_slots, v_slots, rounds = 3 * 128 // dim, {16: 12, 32: 8, 64: 5}[columns], 3 if columns == 16 else 4
    lanes = 4 if dim == 64 else 1
    message = CLUSTER_ROWS * (kv_rows * 2 + 4 + 4 + lanes * 16)
    tiles = CLUSTER_ROWS * dim * 2 + k_slots * kv_rows * dim * 2 + v_slots * kv_rows * columns * 2
    messages = rounds * (ctas + 1) * _in_units(message, 128)
    barriers = 8 * (2 * k_slots + 2 * v_slots + 8 + rounds * ctas + 2 * rounds)
    floats = CLUSTER_ROWS * (8 * ctas * 4 + 2 * (kv_rows + 8)) + 64
    return ForwardTiles(kv_rows, _in_units(tiles + messages + 4 * floats + barriers, 128))


def _in_units(size: int, unit: int) -> int:
    return -(-size // unit) * unit
