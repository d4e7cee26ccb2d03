"""Launches the forward on the current stream."""

from __future__ import annotations

import threading
from ctypes import addressof
from functools import lru_cache

import torch
from torch import Tensor

from ...options import AttentionOptions
from ...packing import Packing
from ...planning import problem_of
from ...problem import Problem
from .driver import Arguments, LoadedKernel, check, cuda_driver, device_index, load
from .structs import ForwardParams
from .support import DTYPES, Unsupported, check_call, check_device
from .tables import mask_on_device, visits_on_device
from .tensor_map import TensorMap, tma_ready

KV_ROWS = 128
CONSUMER_ROWS = 64  # queries of a consumer warpgroup
# Head dim 64 has room for three consumers, which run faster per element but cover short and masked sequences worse.
CONSUMER_CHOICES = {64: {2: 1.1, 3: 1.0}, 128: {2: 1.0}}  # consumers: time per element, relative
LOG2_E = 1.4426950408889634
CACHED_BYTES = 32 * 2**20  # K and V that may be expected to stay in the L2 cache


def forward(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, packing: Packing | None = None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output and LSE."""
    if packing is not None or sinks is not None:
        raise Unsupported("backend 'hopper' has neither packed sequences nor sinks yet. Tensors on the CPU support both.")
    check_call(q, k, v, options)
    q, k, v = (tma_ready(t) for t in (q, k, v))
    return _call_for(q.device, q.dtype, options, tuple((t.shape, t.stride()) for t in (q, k, v))).run(q, k, v)


def forward_kernel(device: int, dtype: str, dim: int, consumers: int, mask_kind: str) -> LoadedKernel:
    name = f"attention_forward<{dtype}, {dim}, {consumers}, MaskKind::{mask_kind}>"
    return load(device, "forward.cuh", name, 128 * (consumers + 1), shared_bytes(dim, consumers))


def forward_problem(q: Tensor, k: Tensor, options: AttentionOptions) -> Problem:
    """The tiling that visits least, by a fixed rule: like everything that decides bits, a function of one sequence alone."""
    choices = CONSUMER_CHOICES[q.shape[-1]]
    problems = {problem_of(q, k, options, CONSUMER_ROWS * c, KV_ROWS): c * time for c, time in choices.items()}
    return min(problems, key=lambda problem: problems[problem] * int(problem.kept.sum()))


def shared_bytes(dim: int, consumers: int) -> int:
    """As ForwardConfig::SHARED_BYTES (a test compares them): two stages of Q, K and V, output, notes, barriers."""
    q_bytes = consumers * CONSUMER_ROWS * dim * 2
    return 3 * q_bytes + 4 * KV_ROWS * dim * 2 + 32 + 16 + 128


class ForwardCall:
    """Everything about a call that does not change with the addresses of its tensors."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> None:
        device, dim = q.device, q.shape[-1]
        problem = forward_problem(q, k, options)
        consumers = problem.tile_q // CONSUMER_ROWS
        self.mask = mask_on_device(options.mask, problem.q_len, problem.kv_len, device)
        self.visits = visits_on_device(problem, device)
        self.kernel = forward_kernel(device_index(device), DTYPES[q.dtype], dim, consumers, self.mask.kind)
        heads = problem.heads * problem.group
        tickets = problem.batch * heads * self.visits.places
        self.some_attend_nothing = self.visits.places < problem.q_tiles
        self.lse_shape = (problem.batch, heads, problem.q_len)
        self.grid = max(1, min(check_device(device_index(device)), tickets))
        out = q.new_empty(q.shape)
        self.maps = [TensorMap(tensor, box) for tensor, box in ((q, CONSUMER_ROWS), (k, KV_ROWS), (v, KV_ROWS), (out, CONSUMER_ROWS))]
        bytes_per_head = 2 * problem.kv_len * dim * q.element_size() / problem.group
        self.params = ForwardParams(
            batch=problem.batch,
            q_heads=heads,
            group=problem.group,
            places=self.visits.places,
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
            if self.some_attend_nothing:
                out.zero_()
                lse.fill_(-torch.inf)
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
