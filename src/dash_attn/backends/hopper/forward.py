"""Launches the forward on the current stream."""

from __future__ import annotations

import threading
from ctypes import addressof
from functools import lru_cache

import torch
from torch import Tensor

from ...options import AttentionOptions
from ...planning import problem_of
from .driver import Arguments, LoadedKernel, check, cuda_driver, device_index, load
from .structs import ForwardParams
from .support import DTYPES, check_call, check_device
from .tables import mask_on_device, visits_on_device
from .tensor_map import TensorMap, tma_ready

CONSUMERS = {64: 3, 128: 2}  # warpgroups of 64 queries, by head dim
KV_ROWS = 128
LOG2_E = 1.4426950408889634
CACHED_BYTES = 32 * 2**20  # K and V that may be expected to stay in the L2 cache


def forward(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Output and LSE."""
    check_call(q, k, v, options)
    q, k, v = (tma_ready(t) for t in (q, k, v))
    return _call_for(q.device, q.dtype, options, tuple((t.shape, t.stride()) for t in (q, k, v))).run(q, k, v)


def forward_kernel(device: int, dtype: str, dim: int, mask_kind: str) -> LoadedKernel:
    threads = 128 * (CONSUMERS[dim] + 1)
    return load(device, "forward.cuh", f"attention_forward<{dtype}, {dim}, MaskKind::{mask_kind}>", threads, shared_bytes(dim))


def shared_bytes(dim: int) -> int:
    """As ForwardConfig::SHARED_BYTES (a test compares them): Q, two stages of K and V, output, notes, barriers."""
    q_bytes = CONSUMERS[dim] * 64 * dim * 2
    return 2 * q_bytes + 4 * KV_ROWS * dim * 2 + 32 + 112


class ForwardCall:
    """Everything about a call that does not change with the addresses of its tensors."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> None:
        device, dim = q.device, q.shape[-1]
        rows = 64 * CONSUMERS[dim]
        problem = problem_of(q, k, options, rows, KV_ROWS)
        self.mask = mask_on_device(options.mask, problem.q_len, problem.kv_len, device)
        self.visits = visits_on_device(problem, device)
        self.kernel = forward_kernel(device_index(device), DTYPES[q.dtype], dim, self.mask.kind)
        heads = problem.heads * problem.group
        tickets = problem.batch * heads * problem.q_tiles
        self.lse_shape = (problem.batch, heads, problem.q_len)
        self.grid = min(check_device(device_index(device)), tickets)
        out = q.new_empty(q.shape)
        self.maps = [TensorMap(tensor, box) for tensor, box in ((q, 64), (k, KV_ROWS), (v, KV_ROWS), (out, 64))]
        bytes_per_head = 2 * problem.kv_len * dim * q.element_size() / problem.group
        self.params = ForwardParams(
            batch=problem.batch,
            q_heads=heads,
            group=problem.group,
            q_tiles=problem.q_tiles,
            tickets=tickets,
            heads_side_by_side=max(1, min(problem.batch * heads, int(CACHED_BYTES // bytes_per_head))),
            scale_log2=options.scale * LOG2_E,
            mask=self.mask.params,
            visits=self.visits.params,
        )
        self.arguments = Arguments([*(m.address for m in self.maps), addressof(self.params)])
        self.lock = threading.Lock()

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        with torch.cuda.device(q.device):
            out = q.new_empty(q.shape)
            lse = q.new_empty(self.lse_shape, dtype=torch.float32)
            counter = q.new_empty(4, dtype=torch.int32)
            stream = torch.cuda.current_stream().cuda_stream
            with self.lock:  # the parameter structures are shared by all threads; a launch copies them
                for tensor_map, tensor in zip(self.maps, (q, k, v, out), strict=True):
                    tensor_map.point_to(tensor)
                self.params.lse, self.params.next_ticket = lse.data_ptr(), counter.data_ptr()
                check(cuda_driver().cuMemsetD32Async(counter.data_ptr(), 0, 1, stream))
                self.kernel.launch(self.grid, self.arguments, stream)
        return out, lse


@lru_cache(maxsize=256)
def _call_for(device: torch.device, dtype: torch.dtype, options: AttentionOptions, layouts: tuple[tuple, ...]) -> ForwardCall:
    """A call prepared for tensors of these shapes and strides (made here, empty, only to describe them)."""
    with torch.cuda.device(device):
        q, k, v = (torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride in layouts)
        return ForwardCall(q, k, v, options)
