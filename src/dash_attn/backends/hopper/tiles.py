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


_BACKWARD = {
    (64, 64): BackwardTiles(128, 128, columns=64, shared_bytes=232032, sum_pieces=4),
    (96, 96): BackwardTiles(64, 128, columns=128, shared_bytes=231008, sum_pieces=4),
    (128, 128): BackwardTiles(64, 128, columns=128, shared_bytes=231008, sum_pieces=4),
    (192, 192): BackwardTiles(64, 64, columns=192, shared_bytes=214624, sum_pieces=2),
    (256, 256): BackwardTiles(64, 64, columns=256, shared_bytes=230752, sum_pieces=2),
    (192, 128): BackwardTiles(64, 128, columns=192, shared_bytes=230752, sum_pieces=4),
}
# Shared memory of the forward by consumers, of attention to a cache, and of its clusters by columns.
_FORWARD = {
    **{(64, 64): {2: 114896, 3: 139472}, (80, 80): {2: 229584}, (96, 96): {2: 229584}, (128, 128): {2: 229584}},
    **{(192, 128): {2: 225488}, (192, 192): {2: 221392}, (256, 256): {2: 229584}},
}
_DECODE = {64: 106624, 96: 114816, 128: 114816, 192: 196736, 256: 196736}
_CLUSTER = {64: {16: 202368, 32: 208640}, 128: {16: 229504, 32: 225536, 64: 221312}}


def backward_tiles(dim: int, v_dim: int | None = None) -> BackwardTiles:
    """As BackwardConfig. `v_dim`: of v, if not as of q and k."""
    dims = dim, dim if v_dim is None else v_dim
    if dims not in _BACKWARD:
        raise ValueError(f"no backward kernel has head dims {dim} (q and k) and {dims[1]} (v); there are {BACKWARD_DIMS}")
    return _BACKWARD[dims]


def forward_tiles(dim: int, consumers: int, v_dim: int = 0) -> ForwardTiles:
    """As ForwardConfig. v_dim 0: as dim."""
    return ForwardTiles(_forward_kv_rows(dim), _FORWARD[dim, v_dim or dim][consumers])


def _forward_kv_rows(dim: int) -> int:
    return 128 if dim <= 128 else 112 if dim == 192 else 80


DECODE_ROWS = 64  # of a unit: queries of all query heads of a group
DECODE_THREADS = 160
CLUSTER_ROWS, CLUSTER_THREADS = 8, 512
# Which clusters serve units: head dim, columns of V that a CTA owns (so dim / columns CTAs are a cluster), up to how many units.
CLUSTERS = ((64, 16, 30), (64, 32, 66), (128, 16, 15), (128, 32, 30), (128, 64, 66))


def decode_tiles(dim: int) -> ForwardTiles:
    """As DecodeConfig. Rows are those of the forward, so the bits are."""
    return ForwardTiles(_forward_kv_rows(dim), _DECODE[dim])


def cluster_tiles(dim: int, columns: int) -> ForwardTiles:
    """As ClusterConfig."""
    return ForwardTiles(_forward_kv_rows(dim), _CLUSTER[dim][columns])
