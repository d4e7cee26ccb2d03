"""Launches attention to a cache on the current stream. Lengths and pages stay on the device, so a graph can be replayed with others."""

from __future__ import annotations

import threading
from ctypes import addressof
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor

from ....call.kv_cache import CachePlaces, CacheTensors
from ....call.offsets import SequenceOffsets
from ....call.options import AttentionOptions
from ....masks import Causal, Full, Mask, Window
from ...kept import Kept, refuse_capture
from ..driver.launch import check, cuda_driver, current_stream, device_index, on_device
from ..driver.parameters import AppendParams, CacheParams, DecodeParams, Strides
from ..driver.tensor_map import TensorMap, is_tma_ready
from ..driver.trouble import raise_if_troubled, register_call, report_address
from ..driver.workspace import Workspace
from ..support import DTYPES, Unsupported, check_call, refuse_modifiers, sm_count
from ..tiles import CLUSTER_ROWS, CLUSTERS, DECODE_ROWS, decode_tiles, kernel_dim
from .kernel_names import KernelName, cluster_kernel, decode_kernel
from .layout import MOST_CALLS, kernel_scales
from .tables import FAR_AWAY

APPEND = KernelName("decode/append.cuh", "append_to_cache", 128)


def attention_with_cache(
    tensors: CacheTensors, places: CachePlaces, options: AttentionOptions, offsets: SequenceOffsets | None
) -> tuple[Tensor, Tensor]:
    """Appends what is new, then output and LSE."""
    key = _key(tensors, places, options, offsets)
    call = _calls.get(key)
    if call is None:
        refuse_capture()
        check_cache_call(tensors, places, options)
        with on_device(device_index(tensors.q.device)):
            call = DecodeCall(tensors, places, options, offsets)
        _calls.put(key, call)
    return call.run(tensors, places, offsets)


def check_cache_call(tensors: CacheTensors, places: CachePlaces, options: AttentionOptions) -> None:
    """What these kernels take of a cache. It is never copied: it may be most of the GPU's memory."""
    check_call(tensors.q, tensors.v_cache, options)
    refuse_modifiers(options, "a cache")
    window_of(options.mask)
    for name, cache in (("k_cache", tensors.k_cache), ("v_cache", tensors.v_cache)):
        if cache.shape[-1] % 8:
            raise Unsupported(f"backend 'hopper' takes caches with head dims that are multiples of 8; got {name} {tuple(cache.shape)}")
        if not is_tma_ready(cache):
            raise Unsupported(
                f"backend 'hopper' reads caches where they lie: head dims must be contiguous, other strides and the address multiples of"
                f" 16 bytes; got {name} with strides {cache.stride()} at address {cache.data_ptr():#x}"
            )
    if places.block_table is not None and places.cache_leftpad is not None:
        raise Unsupported("backend 'hopper' takes cache_leftpad without block_table: pages begin with a sequence's first key; got both")


def window_of(mask: Mask) -> tuple[int, int]:
    """Keys before and after a query's position; -1: no limit."""
    if isinstance(mask, Full):
        return -1, -1
    if isinstance(mask, Causal):
        return -1, 0
    if isinstance(mask, Window):
        return min(mask.left, FAR_AWAY), min(mask.right, FAR_AWAY)
    raise Unsupported(f"a cache takes a full or causal mask or a window; got {mask}")


def cluster_columns(dim: int, units: int) -> int:
    """What a CTA of a cluster owns where one CTA per unit would leave SMs idle; 0: no clusters. The bits are the same."""
    return next((columns for of_dim, columns, most in CLUSTERS if of_dim == dim and 0 < units <= most), 0)


@dataclass(frozen=True)
class Work:
    """How a call is cut into units, and what serves one."""

    dim: int  # of the kernel
    group: int  # query heads per KV head
    columns: int  # of V that a CTA of a cluster owns; 0: no clusters
    row_tiles: int  # units of a sequence and a KV head
    units: int

    @classmethod
    def of(cls, tensors: CacheTensors, count: int, longest: int) -> Work:
        """Of so many sequences, of which the longest has so many queries."""
        kv_heads, dim = tensors.k_cache.shape[2], kernel_dim(tensors.q.shape[-1], tensors.v_cache.shape[-1])
        group = tensors.q.shape[-2] // kv_heads
        columns = cluster_columns(dim, count * kv_heads * -(-longest * group // CLUSTER_ROWS))
        row_tiles = -(-longest * group // (CLUSTER_ROWS if columns else DECODE_ROWS))
        return cls(dim, group, columns, row_tiles, count * kv_heads * row_tiles)

    @property
    def ctas_of_unit(self) -> int:
        return self.dim // self.columns if self.columns else 1

    @property
    def ctas(self) -> int:
        return self.units * self.ctas_of_unit

    def kernel(self, dtype: str, capped: bool) -> KernelName:
        return cluster_kernel(dtype, self.dim, self.columns, capped) if self.columns else decode_kernel(dtype, self.dim, capped)


class DecodeCall:
    """Everything about a call that does not change with addresses and numbers."""

    def __init__(self, tensors: CacheTensors, places: CachePlaces, options: AttentionOptions, offsets: SequenceOffsets | None) -> None:
        q, cache, v_cache = tensors.q, tensors.k_cache, tensors.v_cache
        self.index, self.device = device_index(q.device), q.device
        sm_count(self.index)  # raises on GPUs that the kernels are not for
        count, longest = (q.shape[0], q.shape[1]) if offsets is None else (len(offsets.cu_seqlens_q) - 1, offsets.max_seqlen_q)
        work = Work.of(tensors, count, longest)
        q_heads, kv_heads, dim, group = q.shape[-2], cache.shape[2], work.dim, work.group
        kv_rows, row_tiles = decode_tiles(dim).kv_rows, work.row_tiles
        self.grid = work.ctas
        if max(self.grid, count * places.new) >= 2**31:
            raise Unsupported(f"backend 'hopper' takes fewer than 2^31 units of {DECODE_ROWS} rows and new keys; got {self.grid}")
        self.params = DecodeParams(
            count=count,
            tokens=0 if offsets is None else len(q),
            q_len=longest,
            q_heads=q_heads,
            kv_heads=kv_heads,
            group=group,
            q_dim=q.shape[-1],
            v_dim=v_cache.shape[-1],
            row_tiles=row_tiles,
            box_rows=kv_rows if places.block_table is None else gcd(cache.shape[1], kv_rows),
            **kernel_scales(options),
        )
        self.params.window_left, self.params.window_right = window_of(options.mask)
        self.params.cache = _cache_params(places, cache, q_heads)
        self.maps = [TensorMap(cache, self.params.box_rows), TensorMap(v_cache, self.params.box_rows, work.columns or 64)]
        kernel = work.kernel(DTYPES[q.dtype], bool(options.softcap)).load(self.index)
        self.launch = kernel.prepare(max(1, self.grid), [*(m.address for m in self.maps), addressof(self.params)])
        self.append = Append(tensors, places, self.params.cache, self.index) if places.new and count else None
        self.out_shape = (*q.shape[:-1], v_cache.shape[-1])
        self.lse_shape = (*q.shape[:-3], q_heads, q.shape[-3])
        self.lock = threading.Lock()

    def run(self, tensors: CacheTensors, places: CachePlaces, offsets: SequenceOffsets | None) -> tuple[Tensor, Tensor]:
        raise_if_troubled()
        with on_device(self.index):
            q = _readable(tensors.q)
            out = q.new_empty(self.out_shape)
            lse = torch.empty(self.lse_shape, dtype=torch.float32, device=self.device)
            logits = None if tensors.sinks is None else tensors.sinks.detach().float().contiguous()
            stream = current_stream(self.index)
            with self.lock:  # the parameter structures are shared by all threads; a launch copies them
                params = self.params
                _point_to(params.cache, places)
                kept = self.append.run(tensors, params.cache, stream) if self.append is not None else None
                params.q, params.q_strides = q.data_ptr(), _strides(q)
                params.out, params.lse = out.data_ptr(), lse.data_ptr()
                params.sinks = None if logits is None else logits.data_ptr()
                params.cu_q = None if offsets is None else offsets.cu_seqlens_q.data_ptr()
                for tensor_map, tensor in zip(self.maps, (tensors.k_cache, tensors.v_cache), strict=True):
                    tensor_map.point_to(tensor.data_ptr())
                if self.grid:
                    self.launch.on(stream)
        del kept  # stream order keeps it alive long enough
        return out, lse


class Append:
    """The kernel that writes new keys and values behind those of their sequences."""

    def __init__(self, tensors: CacheTensors, places: CachePlaces, cache: CacheParams, index: int) -> None:
        k_cache, v_cache = tensors.k_cache, tensors.v_cache
        table = places.block_table
        self.params = AppendParams(
            kv_heads=k_cache.shape[2],
            entries=0 if table is None else table.shape[1],
            k_cache_strides=_strides(k_cache),
            v_cache_strides=_strides(v_cache),
            cache=cache,
        )
        self.params.dims[0], self.params.dims[1] = k_cache.shape[3], v_cache.shape[3]
        # Without a table or rows to choose, no two sequences can meet.
        shared = table is not None or places.cache_batch_idx is not None
        self.owners = Workspace(owners=4 * k_cache.shape[0]) if shared else None
        kernel = APPEND.load(index)
        blocks = tensors.q.shape[0] * places.new
        self._launch = kernel.prepare(blocks, [addressof(self.params)])

    def run(self, tensors: CacheTensors, cache: CacheParams, stream: Any) -> tuple[Any, ...]:
        """Returns memory to keep until the launches are done."""
        assert tensors.k is not None
        assert tensors.v is not None
        k, v, params = _readable(tensors.k), _readable(tensors.v), self.params
        memory = None
        if self.owners is not None:
            memory, at = self.owners.allocate(k.device)
            params.owners = at["owners"]
            check(cuda_driver().cuMemsetD32Async(at["owners"], 0, tensors.k_cache.shape[0], stream))
        params.cache = cache
        params.k, params.v, params.k_strides, params.v_strides = k.data_ptr(), v.data_ptr(), _strides(k), _strides(v)
        params.k_cache, params.v_cache = tensors.k_cache.data_ptr(), tensors.v_cache.data_ptr()
        self._launch.on(stream)
        return memory, k, v


def _cache_params(places: CachePlaces, cache: Tensor, q_heads: int) -> CacheParams:
    table = places.block_table
    return CacheParams(
        page_stride=0 if table is None else table.stride(0),
        added=places.new,
        capacity=places.capacity(cache),
        page_size=cache.shape[1],
        count=cache.shape[0],
        report=report_address(),
        call=register_call(q_heads, 1),
    )


def _point_to(params: CacheParams, places: CachePlaces) -> None:
    lengths = places.cache_seqlens
    params.lengths, params.length = (lengths.data_ptr(), 0) if isinstance(lengths, Tensor) else (None, lengths)
    positions = places.first_position
    params.positions, params.position = (positions.data_ptr(), 0) if isinstance(positions, Tensor) else (None, positions)
    for field, values in (("left_padding", places.cache_leftpad), ("rows", places.cache_batch_idx), ("pages", places.block_table)):
        setattr(params, field, None if values is None else values.data_ptr())


def _readable(tensor: Tensor) -> Tensor:
    """With rows that can be read 16 bytes at a time: queries and new keys are few, so they may be copied."""
    return tensor if is_tma_ready(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def _strides(tensor: Tensor) -> Any:
    """Of batch, row and head."""
    strides = tensor.stride()
    return Strides(*strides[:3]) if tensor.ndim == 4 else Strides(0, *strides[:2])


def _key(tensors: CacheTensors, places: CachePlaces, options: AttentionOptions, offsets: SequenceOffsets | None) -> tuple[Any, ...]:
    given = (tensors.q, tensors.k_cache, tensors.v_cache, places.block_table)
    shapes = tuple(None if t is None else (t.shape, t.stride()) for t in given)
    longest = None if offsets is None else (len(offsets.cu_seqlens_q), offsets.max_seqlen_q)
    first = tensors.q
    padded, chosen = places.cache_leftpad is not None, places.cache_batch_idx is not None
    aligned = tensors.k_cache.data_ptr() % 16 == 0 and tensors.v_cache.data_ptr() % 16 == 0
    return options, shapes, longest, first.dtype, first.device, places.new, padded, chosen, aligned, CLUSTERS


_calls: Kept[DecodeCall] = Kept(MOST_CALLS)
