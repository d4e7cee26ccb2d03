"""Launches the backward on the current stream: packed sequences are planned, then preprocess, the attention kernel, postprocess."""

from __future__ import annotations

import threading
from collections.abc import Callable
from ctypes import addressof
from typing import Any

import torch
from torch import Tensor

from ....call.call import Call, Gradients, Grads, Saved
from ....call.options import AttentionOptions
from ....scheduling.plan import Plan
from ..driver.launch import current_stream, on_device
from ..driver.parameters import Pair, SinkGradientParams
from ..driver.tensor_map import TensorMap
from ..driver.trouble import raise_if_troubled
from ..tiles import threads_per_row
from .backward_setup import BackwardSetup, Parameters, setup_of
from .forward import prepared as prepared_forward
from .layout import CallCache, Layout, empty_contiguous, row_strides
from .mask_bits import MaskBits
from .modified import BackwardModifiers
from .packed import PackedPlanner
from .rank_backward import BackwardInLegs
from .tables import mask_on_device, masks_by_bits, plan_on_device


def backward(call: Call, saved: Saved, grads: Grads) -> Gradients:
    prepared, tensors = _calls.find(call, grads.out, saved.out)
    return prepared.run(tensors, call, saved.lse, grads.lse)


def prepared(call: Call, saved: Saved | None = None, grads: Grads | None = None) -> Callable[[], Any] | None:
    """Of the backward, or without gradients of the forward. Legs are set up by each call."""
    if saved is None or grads is None:
        return prepared_forward(call)
    found = _calls.weakly(call, grads.out, saved.out)
    return None if found is None or isinstance(found(), BackwardInLegs) else found


class BackwardCall:
    """Everything about a call that does not change with the addresses of its tensors."""

    records = False  # by a kernel that notes when every task ran

    def __init__(self, setup: BackwardSetup, tensors: tuple[Tensor, ...]) -> None:
        self.setup, self.layout, self.device = setup, setup.layout, tensors[0].device
        self.workspace, self.ordered, self.workers = setup.workspace, setup.options.ordered, setup.workers
        self.holds_tables = not self.layout.packed
        self.mask = mask_on_device(setup.options.mask, self.layout.q_len, self.layout.kv_len, self.device)
        self.planner = PackedPlanner(self.layout, self.mask, setup.split, setup.options) if self.layout.packed else None
        self.bits: MaskBits | None = None  # of a boolean mask
        self.shapes = [(t.shape, t.stride()) for t in tensors]
        self.padded = (tensors[0].shape[-1], tensors[2].shape[-1]) != (self.layout.q_dim, self.layout.v_dim)
        self.at: dict[str, int] = {}  # addresses of the last workspace
        self.lock = threading.Lock()
        self._fill_parameters(tensors)
        self._prepare_launches()
        if setup.plan is not None:
            self._take_plan(setup.plan)

    def _fill_parameters(self, tensors: tuple[Tensor, ...]) -> None:
        setup, tiles = self.setup, self.setup.tiles
        q, k, v, dout, out = tensors
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        boxes = [(q, tiles.q_rows), (k, tiles.kv_rows), (v, tiles.kv_rows), (dout, tiles.q_rows), (dk, 64), (dv, 64)]
        self.maps = [TensorMap(tensor, rows) for tensor, rows in boxes]
        self.params = Parameters(setup.sizes, tiles, setup.options, self.mask.params, tokens=self.layout.q_len)
        self.params.take_shapes(q, out, dout)
        self.before, self.main, self.after = self.params.before, self.params.main, self.params.after
        self.before.floats_to_zero = (setup.memory["dq"] + setup.memory["sums"]) // 4  # where nothing is ordered
        self.main.first_sum = setup.sizes.first_sum
        self.after.strides = row_strides(dq)
        self.sink = SinkGradientParams(sequences=self.layout.count, tiles=self.params.places)

    def _prepare_launches(self) -> None:
        setup, device, dq_tiles = self.setup, self.layout.device, self.setup.sizes.dq_tiles
        kernels = setup.kernels(self.records)
        threads_before = dq_tiles * setup.tiles.q_rows * threads_per_row(self.layout.backward_dims[1])
        self.preprocess = kernels.preprocess.by_thread(device, threads_before, self.before)
        notes = kernels.modifier_notes
        self.modifiers = None if notes is None else BackwardModifiers(self.layout, setup.options, notes, dq_tiles)
        parameters = [self.main] if self.modifiers is None else [self.main, self.modifiers.params]
        arguments = [*(m.address for m in self.maps), *map(addressof, parameters)]
        attention = kernels.attention.load(device)
        self.attention = attention.prepare(self.workers, arguments, cooperative=setup.cooperative, early=not setup.cooperative)
        blocks = setup.sizes.postprocess_blocks(setup.tiles)
        self.postprocess = kernels.postprocess.load(device).prepare(blocks, [addressof(self.after)], early=True)
        self.sink_gradient = kernels.sink_gradient.load(device).prepare(self.layout.q_heads, [addressof(self.sink)])

    def _take_plan(self, plan: Plan) -> None:
        """Sequences of one length: it was made on the host and is on the device already."""
        self.tables = plan_on_device(plan, self.device)
        self.before.plan = self.tables.params
        self.before.plan.split = self.setup.split
        self.after.sums.parts = Pair(*plan.parts_of_sums)
        self.main.runs, self.main.entries = self.tables.params.runs, self.tables.params.entries
        self.after.q_turns = self.tables.tables["q_turns"] if self.ordered else None
        if masks_by_bits(plan.problem):
            self.bits = MaskBits(plan.problem, False, self.device)

    def backward(self, call: Call, saved: Saved, grads: Grads) -> Gradients | None:
        """None where strides are others, TMA cannot read the tensors at their addresses, or a graph is captured, which has to be noted."""
        q, k, v = call.tensors
        tensors = q, k, v, grads.out, saved.out
        unaligned = (q.data_ptr() | k.data_ptr() | v.data_ptr() | grads.out.data_ptr() | saved.out.data_ptr()) % 16
        if unaligned or torch.cuda.is_current_stream_capturing() or [(t.shape, t.stride()) for t in tensors] != self.shapes:
            return None
        return self.run(tensors, call, saved.lse, grads.lse)

    def run(self, tensors: tuple[Tensor, ...], call: Call, lse: Tensor, dlse: Tensor | None) -> Gradients:
        """tensors: q, k, v, dout and out, as TMA can read them."""
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
                if at is not self.at:
                    self._work_in(at)
                for_q, for_k, for_v, for_dout, for_dk, for_dv = self.maps
                for_q.point_to(q.data_ptr())
                for_k.point_to(k.data_ptr())
                for_v.point_to(v.data_ptr())
                for_dout.point_to(dout.data_ptr())
                for_dk.point_to(dk.data_ptr())
                for_dv.point_to(dv.data_ptr())
                self.params.read(out, dout, lse, dlse)
                self.after.dq = dq.data_ptr()
                if self.setup.sizes.sums:
                    self.after.sums.dk, self.after.sums.dv = dk.data_ptr(), dv.data_ptr()
                held = None if self.bits is None else self.bits.give(self.main.mask, call.elements)
                if self.planner is not None:
                    assert call.offsets is not None
                    self.planner.launch(call.offsets, stream)
                lasting = []
                if self.modifiers is not None:
                    lasting = self.modifiers.launch(call.modifiers, self.before.tiles, at["modifier_notes"], stream)
                self.preprocess.on(stream)
                self.attention.on(stream)
                self.postprocess.on(stream)
                dsinks = None if call.sinks is None else self._sink_gradient(call.sinks, at, stream)
        del memory, held, lasting  # stream order keeps it alive long enough
        return self.layout.without_padding(dq, dk, dv, dsinks) if self.padded else Gradients(dq, dk, dv, dsinks)

    def _work_in(self, at: dict[str, int]) -> None:
        """Where the workspace is. PyTorch's allocator gives the same memory again, so that few calls come here."""
        self.at, before, main, after = at, self.before, self.main, self.after
        self.params.work_in(at)
        before.tickets = main.tickets = at["tickets"]
        before.dq_to_zero = None if self.ordered else at["dq"]
        if self.setup.sizes.sums:
            main.sums = after.sums.sums = at["sums"]
        if self.planner is not None:
            self._take_tables(self.planner, at)

    def _take_tables(self, planner: PackedPlanner, at: dict[str, int]) -> None:
        """Packed sequences: two kernels plan before the others."""
        planner.work_in(at)
        for params in (self.before, self.after, self.sink):
            params.tiles.sequences, params.tiles.tile_places = at["sequences"], at["tile_places"]
        self.main.chains = at["chains"]
        self.after.sums.places = at["sum_places"]
        self.after.q_turns = at["q_turns"] if self.ordered else None

    def _sink_gradient(self, sinks: Tensor, at: dict[str, int], stream: Any) -> Tensor:
        logits = sinks.detach().float().contiguous()
        gradient = torch.empty_like(logits)
        self.sink.sinks, self.sink.gradient = logits.data_ptr(), gradient.data_ptr()
        self.sink.lse_log2, self.sink.delta = at["lse"], at["delta"]
        self.sink_gradient.on(stream)
        return gradient.to(sinks.dtype)


def prepare(layout: Layout, tensors: tuple[Tensor, ...], options: AttentionOptions) -> BackwardCall | BackwardInLegs:
    setup = setup_of(layout, options)
    return BackwardCall(setup, tensors) if setup.legs is None else BackwardInLegs(setup, tensors[0].device)


_calls = CallCache(prepare)
