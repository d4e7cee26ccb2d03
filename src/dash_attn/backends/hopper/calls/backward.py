"""Launches the backward on the current stream: packed sequences are planned, then preprocess, the attention kernel, postprocess."""

from __future__ import annotations

import threading
from ctypes import addressof
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....call.offsets import SequenceOffsets
from ....call.options import AttentionOptions
from ....call.planning import plan_for, problem_of
from ....scheduling.plan import Plan
from ..device.driver import LoadedKernel, current_stream, flag, load_kernel, on_device
from ..device.parameters import BackwardParams, PostprocessParams, PreprocessParams, SinkGradientParams, Strides, TilePlaces
from ..device.tensor_map import TensorMap
from ..device.trouble import MOST_POLLS, raise_if_troubled, register_call, report_address
from ..device.workspace import Workspace
from ..support import sm_count
from ..tiles import HELPER_THREADS, THREADS, backward_tiles, helper_blocks
from .groups import add_in_order, split
from .layout import CallCache, Layout, empty_contiguous, kernel_scales
from .packed import PackedPlanner, packed_sizes
from .tables import MaskOnDevice, mask_on_device, plan_on_device

# Far below every score, but with softcap its square must still be a number: the slope of the cap is 1 - score^2.
MASKED_SCORE, MASKED_CAPPED_SCORE = -1e30, -1e18
TICKET_BYTES = 48  # struct Ticket of common/plan_tables.cuh


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: AttentionOptions,
    offsets: SequenceOffsets | None = None,
    sinks: Tensor | None = None,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dQ, dK, dV and the gradient of the sinks."""
    many_k, many_v, of_parts = split(q, k, v, options)
    call, tensors = _calls.find((q, many_k, many_v, dout, out), of_parts, offsets)
    dq, dk, dv, dsinks = call.run(tensors, lse, offsets, sinks, dlse)
    return dq, add_in_order(dk, k.shape), add_in_order(dv, v.shape), dsinks


def backward_plan(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Plan:
    """The plan a backward of these (batched) tensors walks."""
    layout = Layout.of((q, k, v), options)
    tiles = backward_tiles(layout.dim)
    return plan_for(problem_of(q, k, options, tiles.q_rows, tiles.kv_rows), options.schedule, sm_count(layout.device))


@dataclass(frozen=True)
class BackwardKernels:
    """The kernels of one variant."""

    preprocess: LoadedKernel
    attention: LoadedKernel
    postprocess: LoadedKernel


def backward_kernels(
    device: int, dtype: str, dim: int, ordered: bool, softcap: bool, mask_kind: str, record: bool = False
) -> BackwardKernels:
    tiles = backward_tiles(dim)
    flags = f"{flag(ordered)}, {flag(softcap)}"
    packed = flag(mask_kind == "Packed")
    attention = f"attention_backward<{dtype}, {dim}, {flags}, MaskKind::{mask_kind}{', true' if record else ''}>"
    preprocess = f"backward_preprocess<{dtype}, {threads_per_row(dim)}, {tiles.q_rows}, {packed}>"
    return BackwardKernels(
        load_kernel(device, "backward/preprocess.cuh", preprocess, HELPER_THREADS, 0),
        load_kernel(device, "backward/attention.cuh", attention, THREADS, tiles.shared_bytes),
        load_kernel(device, "backward/postprocess.cuh", f"backward_postprocess<{dtype}, {dim}, {packed}>", HELPER_THREADS, 0),
    )


def threads_per_row(dim: int) -> int:
    """Threads that sum a row in the preprocess, 8 elements each: a power of two."""
    return 8 if dim == 64 else 16 if dim <= 128 else 32


def workspace_of(layout: Layout) -> Workspace:
    """Row statistics, dQ in float32, semaphores and tickets: linear in tokens."""
    tiles = backward_tiles(layout.dim)
    head_tiles = layout.tiles_of_queries(tiles.q_rows)
    dq_tiles = layout.batch * layout.q_heads * head_tiles
    rows = dq_tiles * tiles.q_rows
    chains = layout.batch * layout.tiles_of_keys(tiles.kv_rows)
    packed = packed_sizes(layout, head_tiles, chains) if layout.packed else {}
    return Workspace(
        lse=4 * rows,
        delta=4 * rows,
        dq=4 * rows * tiles.columns,
        semaphores=4 * dq_tiles,
        next_ticket=8,
        tickets=TICKET_BYTES * chains * layout.kv_heads,
        **packed,
    )


class BackwardCall:
    """Everything about a call that does not change with the addresses of its tensors."""

    records = False  # by a kernel that notes when every task ran

    def __init__(self, layout: Layout, tensors: tuple[Tensor, ...], options: AttentionOptions) -> None:
        q, k, v = tensors[:3]
        self.layout, self.device = layout, q.device
        self.tiles = backward_tiles(layout.dim)
        self.ordered = options.ordered
        self.workspace = workspace_of(layout)
        self.head_tiles = layout.tiles_of_queries(self.tiles.q_rows)
        self.dq_tiles = layout.batch * layout.q_heads * self.head_tiles
        self.mask: MaskOnDevice = mask_on_device(options.mask, layout.q_len, layout.kv_len, q.device)
        kind = "Packed" if layout.packed else self.mask.kind
        flags = (self.ordered, bool(options.softcap))
        self.kernels = backward_kernels(layout.device, layout.dtype, layout.dim, *flags, kind, self.records)
        workers = sm_count(layout.device)
        self.packed = PackedPlanner(layout, self.mask, self.head_tiles, options) if layout.packed else None
        self.plan = None if layout.packed else backward_plan(q, k, v, options)
        chains = layout.batch * layout.kv_heads * layout.tiles_of_keys(self.tiles.kv_rows)
        self.workers = min(workers if self.plan is None else self.plan.workers, chains)
        self.holds_tables = not layout.packed
        self.lock = threading.Lock()
        self._prepare(tensors, options)

    def _prepare(self, tensors: tuple[Tensor, ...], options: AttentionOptions) -> None:
        layout, tiles = self.layout, self.tiles
        q, k, v, dout, out = tensors
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        boxes = [(q, tiles.q_rows), (k, tiles.kv_rows), (v, tiles.kv_rows), (dout, tiles.q_rows), (dk, 64), (dv, 64)]
        self.maps = [TensorMap(tensor, rows) for tensor, rows in boxes]
        places = TilePlaces(
            batch=layout.batch,
            q_heads=layout.q_heads,
            group=layout.group,
            q_len=layout.q_len,
            tokens=layout.q_len,
            head_tiles=self.head_tiles,
        )
        self.before = PreprocessParams(
            out_strides=row_strides(out),
            grad_strides=row_strides(dout),
            v_dim=v.shape[-1],
            kv_rows=tiles.kv_rows,
            tile_columns=tiles.columns,
            tiles=places,
            mask=self.mask.params,
        )
        self.main = BackwardParams(
            most_polls=MOST_POLLS,
            call=register_call(layout.q_heads, self.head_tiles),
            group=layout.group,
            head_tiles=self.head_tiles,
            scale=options.scale,
            masked_score=MASKED_CAPPED_SCORE if options.softcap else MASKED_SCORE,
            mask=self.mask.params,
            report=report_address(),
            **kernel_scales(options),
        )
        self.after = PostprocessParams(
            strides=row_strides(dq),
            dim=q.shape[-1],
            scale=options.scale,
            report=report_address(),
            most_polls=MOST_POLLS,
            call=self.main.call,
            tiles=places,
        )
        if self.plan is not None:
            self.tables = plan_on_device(self.plan, self.device)
            self.before.plan = self.tables.params
            self.main.runs, self.main.entries = self.tables.params.runs, self.tables.params.entries
            self.after.q_ranks = self.tables.tables["q_ranks"] if self.ordered else None
        name = f"sink_gradient<{tiles.q_rows}, {flag(layout.packed)}>"
        sink_kernel = load_kernel(layout.device, "backward/sink_gradient.cuh", name, HELPER_THREADS, 0)
        self.sink = SinkGradientParams(sequences=layout.count, tiles=places)
        kernels, arguments = self.kernels, [*(m.address for m in self.maps), addressof(self.main)]
        threads_before = self.dq_tiles * tiles.q_rows * threads_per_row(layout.dim)
        self.preprocess = kernels.preprocess.prepare(helper_blocks(threads_before), [addressof(self.before)])
        # Gangs wait for each other: all their CTAs must be resident, also when other work shares the GPU.
        gangs = self.plan is None or self.plan.gang > 1
        self.attention = kernels.attention.prepare(self.workers, arguments, cooperative=gangs, early=not gangs)
        self.postprocess = kernels.postprocess.prepare(self.dq_tiles, [addressof(self.after)], early=True)
        self.sink_gradient = sink_kernel.prepare(layout.q_heads, [addressof(self.sink)])

    def run(
        self, tensors: tuple[Tensor, ...], lse: Tensor, offsets: SequenceOffsets | None, sinks: Tensor | None, dlse: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        raise_if_troubled()
        q, k, v, dout, out = tensors
        index = self.layout.device
        with on_device(index):
            dq, dk, dv = empty_contiguous(q), empty_contiguous(k), empty_contiguous(v)
            memory, at = self.workspace.allocate(self.device)
            if not lse.is_contiguous():
                lse = lse.contiguous()
            if dlse is not None and not dlse.is_contiguous():
                dlse = dlse.contiguous()
            stream = current_stream(index)
            with self.lock:  # the parameter structures are shared by all threads; a launch copies them
                for tensor_map, tensor in zip(self.maps, (q, k, v, dout, dk, dv), strict=True):
                    tensor_map.point_to(tensor.data_ptr())
                self._point(at, out, dout, lse, dq)
                self.before.grad_lse = None if dlse is None else dlse.data_ptr()
                if self.packed is not None and offsets is not None:
                    self.packed.launch(offsets, at, stream)
                    self._point_to_sequences(at)
                self.preprocess.on(stream)
                self.attention.on(stream)
                self.postprocess.on(stream)
                dsinks = None if sinks is None else self._sink_gradient(sinks, at, stream)
        del memory  # stream order keeps it alive long enough
        return self.layout.without_padding(dq, dk, dv, dsinks)

    def _point(self, at: dict[str, int], out: Tensor, dout: Tensor, lse: Tensor, dq: Tensor) -> None:
        before, main, after = self.before, self.main, self.after
        before.out, before.grad_out, before.lse = out.data_ptr(), dout.data_ptr(), lse.data_ptr()
        before.lse_log2 = main.lse = at["lse"]
        before.delta = main.delta = at["delta"]
        before.semaphores = main.semaphores = after.semaphores = at["semaphores"]
        before.next_ticket = main.next_ticket = at["next_ticket"]
        before.tickets = main.tickets = at["tickets"]
        main.dq = after.dq_accumulator = at["dq"]
        before.dq_to_zero = None if self.ordered else at["dq"]
        after.dq = dq.data_ptr()

    def _point_to_sequences(self, at: dict[str, int]) -> None:
        for params in (self.before, self.after, self.sink):
            params.tiles.sequences, params.tiles.tile_places = at["sequences"], at["tile_places"]
        self.main.chains = at["chains"]
        self.after.q_ranks = at["q_ranks"] if self.ordered else None

    def _sink_gradient(self, sinks: Tensor, at: dict[str, int], stream: Any) -> Tensor:
        logits = sinks.detach().float().contiguous()
        gradient = torch.empty_like(logits)
        self.sink.sinks, self.sink.gradient = logits.data_ptr(), gradient.data_ptr()
        self.sink.lse_log2, self.sink.delta = at["lse"], at["delta"]
        self.sink_gradient.on(stream)
        return gradient.to(sinks.dtype)


def row_strides(tensor: Tensor) -> Any:
    """Strides of batch, row and head; packed tokens are one batch."""
    return Strides(*tensor.stride()[:3]) if tensor.ndim == 4 else Strides(0, *tensor.stride()[:2])


_calls = CallCache(BackwardCall)
