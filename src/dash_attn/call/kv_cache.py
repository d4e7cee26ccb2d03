"""A cache of keys and values: which of its slots are whose. Shapes are looked at here; values by the backends, which read them."""

from typing import NamedTuple

import torch
from torch import SymInt, Tensor

from ..masks import is_whole
from .offsets import SequenceOffsets
from .options import AttentionOptions
from .tensor_checks import LAYOUTS, check_dtype, check_sinks, check_strided, shape_problem

DECODE_EQUALS_TRAINING = "decode-equals-training"  # a guarantee: a token has the bits of the whole forward, whatever the cache
PAGE_UNIT = 16  # rows: pages have a multiple of it


class CacheCall(NamedTuple):
    """A call of attention to a cache, in FlashAttention's words. Lengths and pages are on the device of the cache and not read here.

    New keys and values come both or not at all; `k` and `v` are (batch, new, KV heads, head dim).
    Sequence i has slots cache_leftpad[i] to cache_seqlens[i], and `new` more behind them that the call fills. Without a block
    table the slots are those of row cache_batch_idx[i] of the cache; with one, of the pages block_table[i], end to end.
    Its first key has position first_position[i]: 0, unless the cache dropped keys before it.
    With `offsets` queries are packed.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    options: AttentionOptions = None  # type: ignore[assignment]  # until they are read, which a traced program leaves to its operator
    k: Tensor | None = None
    v: Tensor | None = None
    sinks: Tensor | None = None
    cache_seqlens: Tensor | int = 0
    cache_batch_idx: Tensor | None = None
    cache_leftpad: Tensor | None = None
    block_table: Tensor | None = None
    first_position: Tensor | int = 0
    offsets: SequenceOffsets | None = None

    @property
    def new(self) -> int:
        """Keys of each sequence that are appended."""
        return 0 if self.k is None else self.k.shape[1]

    @property
    def sequences(self) -> int:
        return len(self.q) if self.offsets is None else len(self.offsets.cu_seqlens_q) - 1

    @property
    def capacity(self) -> int:
        """Slots of a sequence."""
        rows: int = self.k_cache.shape[1]
        return rows if self.block_table is None else self.block_table.shape[1] * rows


def check_cache(call: CacheCall) -> None:
    """Shapes, dtypes and devices."""
    _check_tensors(call)
    batch, device = call.sequences, call.q.device
    if call.k is not None:
        _check_new(call, batch)
    for name in ("cache_seqlens", "cache_batch_idx", "cache_leftpad", "first_position"):
        values = getattr(call, name)
        if isinstance(values, Tensor):
            _check_numbers(name, values, (batch,), device)
        elif name in ("cache_seqlens", "first_position"):
            _check_one_number(name, values)
    _check_places(call, batch)
    check_sinks(call.sinks, call.q)
    if call.offsets is not None:
        call.offsets.check_device(device)


def _check_places(call: CacheCall, batch: int) -> None:
    cache, table = call.k_cache, call.block_table
    if table is None:
        if call.cache_batch_idx is None and cache.shape[0] < batch:
            raise ValueError(f"the cache must have a row for each of the {batch} sequences of q; got {cache.shape[0]} rows")
        return
    if not isinstance(call.first_position, (int, SymInt)) or call.first_position != 0:
        raise ValueError(
            "pages keep the positions of their keys: first_position must be 0 with block_table; entries of dropped keys may be -1"
        )
    if call.cache_batch_idx is not None:
        raise ValueError("block_table says where the keys of each sequence are: cache_batch_idx must be None with it")
    if not isinstance(table, Tensor):
        raise TypeError(f"block_table must be a tensor; got {type(table).__name__}")
    if table.ndim != 2:
        raise ValueError(f"block_table must be 2-d, (sequences, entries); got shape {tuple(table.shape)}")
    _check_numbers("block_table", table, (batch, table.shape[1]), call.q.device)
    if cache.shape[1] == 0 or cache.shape[1] % PAGE_UNIT:
        raise ValueError(f"pages must have a multiple of {PAGE_UNIT} rows; got k_cache {tuple(cache.shape)}, pages of {cache.shape[1]}")


def _check_tensors(call: CacheCall) -> None:
    """Queries and caches."""
    q, k_cache, v_cache = call[:3]
    check_strided(q=q, k_cache=k_cache, v_cache=v_cache)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.ndim != 4:
            raise ValueError(
                f"{name} must be 4-d, (rows, length, heads, head dim) or, with block_table, (pages, page size, heads, head dim);"
                f" got shape {tuple(cache.shape)}"
            )
        if cache.dtype != q.dtype:
            raise ValueError(f"{name} must have the dtype of q ({q.dtype}); got {cache.dtype}")
        if cache.device != q.device:
            raise ValueError(f"{name} must be on the device of q ({q.device}); got {cache.device}")
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(f"k_cache and v_cache may differ in the head dim only; got {tuple(k_cache.shape)} and {tuple(v_cache.shape)}")
    if 0 in k_cache.shape[:2]:
        raise ValueError(f"the cache has no slots; got k_cache {tuple(k_cache.shape)}")
    ndim = 4 if call.offsets is None else 3
    if q.ndim != ndim:
        raise ValueError(f"q must be {ndim}-d {LAYOUTS[ndim]}; got shape {tuple(q.shape)}")
    check_dtype(q.dtype)
    problem = shape_problem(q.shape[-3:], k_cache.shape[1:], v_cache.shape[1:])
    if problem is not None:
        raise ValueError(f"{problem}; got q {tuple(q.shape)}, k_cache {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)}")


def _check_new(call: CacheCall, batch: int) -> None:
    assert call.k is not None
    assert call.v is not None, "whoever reads the arguments looks"
    if call.k_cache is call.v_cache and call.k is not call.v:
        raise ValueError("k_cache and v_cache are one tensor, in which the new values would replace the new keys: give two")
    check_strided(k=call.k, v=call.v)
    heads = call.k_cache.shape[2]
    for name, new, cache in (("k", call.k, call.k_cache), ("v", call.v, call.v_cache)):
        length = call.k.shape[1] if call.k.ndim == 4 else 0
        expected = (batch, length, heads, cache.shape[3])
        if tuple(new.shape) != expected:
            raise ValueError(
                f"{name} must be (batch, new tokens, KV heads, head dim) like q and {name}_cache, here ({batch}, new tokens, {heads},"
                f" {cache.shape[3]}), with as many new tokens in v as in k; got k {tuple(call.k.shape)}, v {tuple(call.v.shape)}"
            )
        if new.dtype != cache.dtype or new.device != cache.device:
            raise ValueError(f"{name} must be like {name}_cache ({cache.dtype} on {cache.device}); got {new.dtype} on {new.device}")
        if any(stride == 0 and size > 1 for stride, size in zip(cache.stride(), cache.shape, strict=True)):
            raise ValueError(
                f"{name}_cache must have memory for every slot where keys are appended; got an expanded tensor of strides {cache.stride()}"
            )


def _check_numbers(name: str, values: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    check_strided(**{name: values})
    if values.dtype != torch.int32 or tuple(values.shape) != shape:
        words = " x ".join(map(str, shape))
        raise ValueError(f"{name} must be an int32 tensor of {words} numbers; got {values.dtype} of shape {tuple(values.shape)}")
    if values.device != device:
        raise ValueError(f"{name} must be on the device of q ({device}); got {values.device}")
    if values.shape[-1] > 1 and values.stride(-1) != 1:
        raise ValueError(f"{name} must be contiguous in its last dimension; got stride {values.stride(-1)}")


def _check_one_number(name: str, number: int) -> None:
    if isinstance(number, SymInt):  # of a program that is traced
        return
    if not is_whole(number) or not 0 <= number < 2**31:
        raise ValueError(f"{name} must be a whole number >= 0 and below 2^31, or an int32 tensor with one per sequence; got {number!r}")
