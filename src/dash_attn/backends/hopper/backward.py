"""Launches the backward: preprocess, the attention kernel, postprocess, on the current stream."""

from __future__ import annotations

import threading
from ctypes import addressof
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ...options import AttentionOptions
from ...plan import Plan
from ...planning import plan_for, problem_of
from ...problem import Problem
from .driver import Arguments, LoadedKernel, device_index, load
from .hang import MOST_POLLS, raise_if_hung, report_address
from .structs import BackwardParams, PostprocessParams, PreprocessParams, Strides
from .support import DTYPES, check_call, check_device
from .tables import MaskOnDevice, PlanOnDevice, mask_on_device, plan_on_device
from .tensor_map import TensorMap, tma_ready

KV_ROWS = 128
Q_ROWS = {64: 128, 128: 64}  # rows of a Q tile, by head dim
THREADS, HELPER_THREADS = 384, 256
LOG2_E = 1.4426950408889634
MASKED_SCORE = -1e30
ALIGNMENT = 256
TICKET_WORDS = 8  # of struct Ticket in plan.cuh


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV."""
    check_call(q, k, v, options)
    q, k, v, dout, out = (tma_ready(t) for t in (q, k, v, dout, out))
    layouts = tuple((t.shape, t.stride()) for t in (q, k, v, dout, out))
    return _call_for(q.device, q.dtype, options, layouts).run(q, k, v, dout, out, lse)


def backward_plan(q: Tensor, k: Tensor, options: AttentionOptions) -> Plan:
    """The plan a backward of these tensors walks."""
    problem = problem_of(q, k, options, Q_ROWS[q.shape[-1]], KV_ROWS)
    return plan_for(problem, options.schedule, check_device(device_index(q.device)))


@dataclass(frozen=True)
class BackwardKernels:
    """The three kernels of one variant."""

    preprocess: LoadedKernel
    attention: LoadedKernel
    postprocess: LoadedKernel


def backward_kernels(device: int, dtype: str, dim: int, ordered: bool, mask_kind: str, record: bool = False) -> BackwardKernels:
    rows = Q_ROWS[dim]
    flag = "true" if ordered else "false"
    attention = f"attention_backward<{dtype}, {dim}, {rows}, {flag}, MaskKind::{mask_kind}{', true' if record else ''}>"
    return BackwardKernels(
        load(device, "preprocess.cuh", f"backward_preprocess<{dtype}, {dim}>", HELPER_THREADS, 0),
        load(device, "backward.cuh", attention, THREADS, shared_bytes(dim)),
        load(device, "postprocess.cuh", f"backward_postprocess<{dtype}, {dim}, {rows}>", HELPER_THREADS, 0),
    )


def shared_bytes(dim: int) -> int:
    """As BackwardConfig::SHARED_BYTES (a test compares them): K, V, two stages of Q, dO, dS, dQ, row statistics, notes, barriers."""
    rows = Q_ROWS[dim]
    tiles = 2 * KV_ROWS * dim * 2 + 2 * (2 * rows * dim * 2 + rows * KV_ROWS * 2 + rows * dim * 4)
    return tiles + 4 * rows * 4 + 8 * 16 + 2 * 16 + 320


def workspace_sizes(problem: Problem, dim: int) -> tuple[int, ...]:
    """Words of LSE, delta, dQ accumulator, semaphores, ticket counter and tickets: linear in tokens."""
    tiles = problem.batch * problem.heads * problem.group * problem.q_tiles
    rows = tiles * problem.tile_q
    return rows, rows, rows * dim, tiles, 1, problem.chains * TICKET_WORDS


class BackwardCall:
    """Everything about a call that does not change with the addresses of its tensors."""

    def __init__(self, q: Tensor, k: Tensor, tensors: tuple[Tensor, ...], options: AttentionOptions) -> None:
        device = q.device
        self.plan = backward_plan(q, k, options)
        self.ordered = options.ordered
        problem = self.plan.problem
        self.tables: PlanOnDevice = plan_on_device(self.plan, device)
        self.mask: MaskOnDevice = mask_on_device(options.mask, problem.q_len, problem.kv_len, device)
        dim = q.shape[-1]
        self.kernels = backward_kernels(device_index(device), DTYPES[q.dtype], dim, self.ordered, self.mask.kind)
        self.heads = problem.batch * problem.heads * problem.group
        self.padded = problem.q_tiles * problem.tile_q
        self.sizes = workspace_sizes(problem, dim)
        self.workers = min(self.plan.workers, problem.chains)
        self.lock = threading.Lock()
        self._prepare(q, k, tensors, options)

    def _prepare(self, q: Tensor, k: Tensor, tensors: tuple[Tensor, ...], options: AttentionOptions) -> None:
        problem = self.plan.problem
        dout, out, dq, dk, dv = tensors[3], tensors[4], q.new_empty(q.shape), k.new_empty(k.shape), k.new_empty(k.shape)
        rows = problem.tile_q
        boxes = ((q, rows), (k, KV_ROWS), (tensors[2], KV_ROWS), (dout, rows), (dk, KV_ROWS // 2), (dv, KV_ROWS // 2))
        self.maps = [TensorMap(tensor, box) for tensor, box in boxes]
        self.before = PreprocessParams(
            out_strides=Strides(*out.stride()[:3]),
            grad_strides=Strides(*dout.stride()[:3]),
            batch=problem.batch,
            q_heads=problem.heads * problem.group,
            group=problem.group,
            q_len=problem.q_len,
            padded_len=self.padded,
            q_tiles=problem.q_tiles,
            plan=self.tables.params,
        )
        self.main = BackwardParams(
            most_polls=MOST_POLLS,
            kv_heads=problem.heads,
            group=problem.group,
            q_tiles=problem.q_tiles,
            scale_log2=options.scale * LOG2_E,
            scale=options.scale,
            masked_score=MASKED_SCORE,
            mask=self.mask.params,
            plan=self.tables.params,
            hang_report=report_address(problem.heads * problem.group, problem.q_tiles),
        )
        self.after = PostprocessParams(
            ranks_per_q_tile=self.tables.ranks_per_q_tile,
            strides=Strides(*dq.stride()[:3]),
            q_heads=problem.heads * problem.group,
            q_len=problem.q_len,
            q_tiles=problem.q_tiles,
            scale=options.scale,
        )
        self.arguments_before = Arguments([addressof(self.before)])
        self.arguments_main = Arguments([*(m.address for m in self.maps), addressof(self.main)])
        self.arguments_after = Arguments([addressof(self.after)])

    def run(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raise_if_hung()
        with torch.cuda.device(q.device):
            dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
            workspace, addresses = self._workspace(q.device)
            lse = lse.contiguous()
            stream = torch.cuda.current_stream().cuda_stream
            with self.lock:  # the parameter structures are shared by all threads; a launch copies them
                for tensor_map, tensor in zip(self.maps, (q, k, v, dout, dk, dv), strict=True):
                    tensor_map.point_to(tensor)
                self._point(addresses, out, dout, lse, dq)
                self._launch(stream, dq)
        del workspace  # stream order keeps it alive long enough
        return dq, dk, dv

    def _workspace(self, device: torch.device) -> tuple[Tensor, list[int]]:
        """All of the workspace in one allocation."""
        offsets, total = [], 0
        for size in self.sizes:
            offsets.append(total)
            total += -(-size * 4 // ALIGNMENT) * ALIGNMENT
        memory = torch.empty(total, dtype=torch.uint8, device=device)
        return memory, [memory.data_ptr() + offset for offset in offsets]

    def _point(self, addresses: list[int], out: Tensor, dout: Tensor, lse: Tensor, dq: Tensor) -> None:
        before, main, after = self.before, self.main, self.after
        before.out, before.grad_out, before.lse = out.data_ptr(), dout.data_ptr(), lse.data_ptr()
        before.lse_log2, before.delta, accumulator, before.semaphores, before.next_ticket, before.tickets = addresses
        before.dq_to_zero = None if self.ordered else accumulator
        main.lse, main.delta, main.dq, main.semaphores, main.next_ticket, main.tickets = addresses
        after.dq_accumulator, after.dq = accumulator, dq.data_ptr()

    def _launch(self, stream: int, dq: Tensor) -> None:
        dim = dq.shape[-1]
        blocks = -(-self.heads * self.padded * (dim // 8) // HELPER_THREADS)
        self.kernels.preprocess.launch(blocks, self.arguments_before, stream)
        # Gangs wait for each other: all their CTAs must be resident, also when other work shares the GPU.
        self.kernels.attention.launch(self.workers, self.arguments_main, stream, cooperative=self.plan.gang > 1)
        self.kernels.postprocess.launch(self.heads * self.plan.problem.q_tiles, self.arguments_after, stream)


@lru_cache(maxsize=256)
def _call_for(device: torch.device, dtype: torch.dtype, options: AttentionOptions, layouts: tuple[tuple, ...]) -> BackwardCall:
    """A call prepared for tensors of these shapes and strides (made here, empty, only to describe them)."""
    with torch.cuda.device(device):
        tensors = tuple(torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride in layouts)
        return BackwardCall(tensors[0], tensors[1], tensors, options)
