"""Launches attention to a cache on the current stream. Lengths and pages stay on the device, so a graph can be replayed with others."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from ctypes import addressof
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor

from ....call.call import Saved
from ....call.kv_cache import CacheCall
from ....errors import Unsupported
from ....masks import Mask
from ...gpus import FAR_AWAY
from ...kept import Kept, refuse_capture
from ..driver.launch import check, cuda_driver, current_stream, device_index, on_device
from ..driver.parameters import AppendParams, CacheParams, DecodeParams
from ..driver.tensor_map import TensorMap, has_tma_strides, is_tma_ready, tma_ready
from ..driver.trouble import raise_if_troubled, register_call, report_address
from ..driver.workspace import Workspace
from ..support import DTYPES, check_call, refuse_modifiers, sm_count
from ..tiles import CLUSTER_ROWS, CLUSTERS, DECODE_ROWS, decode_tiles, kernel_dim
from .kernel_names import KernelName, decode_kernel
from .layout import MOST_CALLS, row_strides

APPEND = KernelName("decode/append.cuh", "append_to_cache", 128)


def attention_with_cache(call: CacheCall) -> Saved:
    """Appends what is new, then output and LSE."""
    return _calls.find(_key(call), lambda: _prepare(call)).run(call)


def prepared(call: CacheCall) -> Callable[[], DecodeCall | None]:
    """Weakly, so that it goes when the cache lets it go."""
    return weakref.ref(_calls.find(_key(call), lambda: _prepare(call)))


def _prepare(call: CacheCall) -> DecodeCall:
    refuse_capture()
    check_cache_call(call)
    with on_device(device_index(call.q.device)):
        return DecodeCall(call)


def check_cache_call(call: CacheCall) -> None:
    """What these kernels take of a cache. It is never copied: it may be most of the GPU's memory."""
    check_call(call.q, call.v_cache, call.options)
    refuse_modifiers(call.options, "a cache")
    window_of(call.options.mask)
    for name, cache in (("k_cache", call.k_cache), ("v_cache", call.v_cache)):
        if cache.shape[-1] % 8:
            raise Unsupported(f"backend 'hopper' takes caches with head dims that are multiples of 8; got {name} {tuple(cache.shape)}")
        if not is_tma_ready(cache):
            raise Unsupported(
                f"backend 'hopper' reads caches where they lie: head dims must be contiguous, other strides and the address multiples of"
                f" 16 bytes; got {name} with strides {cache.stride()} at address {cache.data_ptr():#x}"
            )
    if call.block_table is not None and call.cache_leftpad is not None:
        raise Unsupported("backend 'hopper' takes cache_leftpad without block_table: pages begin with a sequence's first key; got both")


def window_of(mask: Mask) -> tuple[int, int]:
    """Keys before and after a query's position; -1: no limit."""
    if mask.sides is None:
        raise Unsupported(f"a cache takes a full or causal mask or a window; got {mask}")
    left, right = mask.sides
    return min(left, FAR_AWAY), min(right, FAR_AWAY)


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
    def of(cls, call: CacheCall) -> Work:
        count, longest = call.sequences, _longest(call)
        kv_heads, dim = call.k_cache.shape[2], kernel_dim(call.q.shape[-1], call.v_cache.shape[-1])
        group = call.q.shape[-2] // kv_heads
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
        return decode_kernel(dtype, self.dim, capped, self.columns)


class DecodeCall:
    """Everything about a call that does not change with addresses and numbers."""

    def __init__(self, call: CacheCall) -> None:
        q, cache, v_cache, options = call[:4]
        self.index, self.device = device_index(q.device), q.device
        sm_count(self.index)  # raises on GPUs that the kernels are not for
        count, work = call.sequences, Work.of(call)
        q_heads, kv_rows = q.shape[-2], decode_tiles(work.dim).kv_rows
        self.grid = work.ctas
        if max(self.grid, count * call.new) >= 2**31:
            raise Unsupported(f"backend 'hopper' takes fewer than 2^31 units of {DECODE_ROWS} rows and new keys; got {self.grid}")
        self.params = DecodeParams(
            count=count,
            tokens=0 if call.offsets is None else len(q),
            q_len=_longest(call),
            q_heads=q_heads,
            kv_heads=cache.shape[2],
            group=work.group,
            q_dim=q.shape[-1],
            v_dim=v_cache.shape[-1],
            row_tiles=work.row_tiles,
            box_rows=kv_rows if call.block_table is None else gcd(cache.shape[1], kv_rows),
            **options.kernel_scales,
        )
        self.params.window_left, self.params.window_right = window_of(options.mask)
        self.params.cache = _cache_params(call)
        self.maps = [TensorMap(cache, self.params.box_rows), TensorMap(v_cache, self.params.box_rows, work.columns or 64)]
        kernel = work.kernel(DTYPES[q.dtype], bool(options.softcap)).load(self.index)
        self.launch = kernel.prepare(max(1, self.grid), [*(m.address for m in self.maps), addressof(self.params)])
        self.append = Append(call, self.params.cache, self.index) if call.new and count else None
        self.out_shape = (*q.shape[:-1], v_cache.shape[-1])
        self.lse_shape = (*q.shape[:-3], q_heads, q.shape[-3])
        self.out_strides, self.lse_strides = (torch.empty(shape, device="meta").stride() for shape in (self.out_shape, self.lse_shape))
        self.reads_q = q.shape[-1] % 8 == 0 and has_tma_strides(q)
        self.q_strides: tuple[int, ...] = ()  # of the last call
        self.lock = threading.Lock()

    def forward(self, call: CacheCall) -> Saved | None:
        """Of a call of the kind that this was prepared for."""
        if (call.k_cache.data_ptr() | call.v_cache.data_ptr()) % 16 or torch.cuda.is_current_stream_capturing():
            return None
        return self.run(call)

    def run(self, call: CacheCall) -> Saved:
        raise_if_troubled()
        with on_device(self.index):
            q, sinks, offsets = call.q, call.sinks, call.offsets
            if not self.reads_q or q.data_ptr() % 16:
                q = tma_ready(q)
            out = torch.empty_strided(self.out_shape, self.out_strides, dtype=q.dtype, device=self.device)
            lse = torch.empty_strided(self.lse_shape, self.lse_strides, dtype=torch.float32, device=self.device)
            logits = None if sinks is None else sinks.detach().float().contiguous()
            stream = current_stream(self.index)
            with self.lock:  # the parameter structures are shared by all threads; a launch copies them
                params = self.params
                _point_to(params.cache, call)
                kept = self.append.run(call, params.cache, stream) if self.append is not None else None
                if q.stride() != self.q_strides:
                    self.q_strides, params.q_strides = q.stride(), row_strides(q)
                params.q, params.out, params.lse = q.data_ptr(), out.data_ptr(), lse.data_ptr()
                params.sinks = None if logits is None else logits.data_ptr()
                params.cu_q = None if offsets is None else offsets.cu_seqlens_q.data_ptr()
                for_k, for_v = self.maps
                for_k.point_to(call.k_cache.data_ptr())
                for_v.point_to(call.v_cache.data_ptr())
                if self.grid:
                    self.launch.on(stream)
        del kept  # stream order keeps it alive long enough
        return Saved(out, lse)


class Append:
    """The kernel that writes new keys and values behind those of their sequences."""

    def __init__(self, call: CacheCall, cache: CacheParams, index: int) -> None:
        k_cache, v_cache, table = call.k_cache, call.v_cache, call.block_table
        self.params = AppendParams(
            kv_heads=k_cache.shape[2],
            entries=0 if table is None else table.shape[1],
            k_cache_strides=row_strides(k_cache),
            v_cache_strides=row_strides(v_cache),
            cache=cache,
        )
        self.params.dims[0], self.params.dims[1] = k_cache.shape[3], v_cache.shape[3]
        # Without a table or rows to choose, no two sequences can meet.
        shared = table is not None or call.cache_batch_idx is not None
        self.owners = Workspace(owners=4 * k_cache.shape[0]) if shared else None
        self._launch = APPEND.load(index).prepare(call.q.shape[0] * call.new, [addressof(self.params)])

    def run(self, call: CacheCall, cache: CacheParams, stream: Any) -> tuple[Any, ...]:
        """Returns memory to keep until the launches are done."""
        assert call.k is not None
        assert call.v is not None
        k, v, params = tma_ready(call.k), tma_ready(call.v), self.params  # few, so they may be copied
        memory = None
        if self.owners is not None:
            memory, at = self.owners.allocate(k.device)
            params.owners = at["owners"]
            check(cuda_driver().cuMemsetD32Async(at["owners"], 0, call.k_cache.shape[0], stream))
        params.cache = cache
        params.k, params.v, params.k_strides, params.v_strides = k.data_ptr(), v.data_ptr(), row_strides(k), row_strides(v)
        params.k_cache, params.v_cache = call.k_cache.data_ptr(), call.v_cache.data_ptr()
        self._launch.on(stream)
        return memory, k, v


def _cache_params(call: CacheCall) -> CacheParams:
    table, cache = call.block_table, call.k_cache
    return CacheParams(
        page_stride=0 if table is None else table.stride(0),
        added=call.new,
        capacity=call.capacity,
        page_size=cache.shape[1],
        count=cache.shape[0],
        report=report_address(),
        call=register_call(call.q.shape[-2], 1),
    )


def _point_to(params: CacheParams, call: CacheCall) -> None:
    lengths, positions = call.cache_seqlens, call.first_position
    params.lengths, params.length = (lengths.data_ptr(), 0) if isinstance(lengths, Tensor) else (None, lengths)
    params.positions, params.position = (positions.data_ptr(), 0) if isinstance(positions, Tensor) else (None, positions)
    params.left_padding = None if call.cache_leftpad is None else call.cache_leftpad.data_ptr()
    params.rows = None if call.cache_batch_idx is None else call.cache_batch_idx.data_ptr()
    params.pages = None if call.block_table is None else call.block_table.data_ptr()


def _longest(call: CacheCall) -> int:
    """Queries of a sequence, at most."""
    return call.q.shape[1] if call.offsets is None else call.offsets.max_seqlen_q


def _key(call: CacheCall) -> tuple[Any, ...]:
    q, k_cache, v_cache, options = call[:4]
    shapes = tuple(None if t is None else (t.shape, t.stride()) for t in (q, k_cache, v_cache, call.block_table))
    longest = None if call.offsets is None else (call.sequences, call.offsets.max_seqlen_q)
    padded, chosen = call.cache_leftpad is not None, call.cache_batch_idx is not None
    aligned = k_cache.data_ptr() % 16 == 0 and v_cache.data_ptr() % 16 == 0
    return options, shapes, longest, q.dtype, q.device, call.new, padded, chosen, aligned, CLUSTERS


_calls: Kept[DecodeCall] = Kept(MOST_CALLS)
