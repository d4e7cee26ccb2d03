"""Launches the backward on the current stream: packed sequences are planned, then preprocess, the attention kernel, postprocess."""

from __future__ import annotations

import threading
from ctypes import addressof
from typing import Any

import torch
from torch import Tensor

from ....call.call import Call, Gradients, Grads, Saved
from ....call.offsets import SequenceOffsets
from ....call.options import AttentionOptions
from ....scheduling.validate import TooFewWorkers
from ..driver.launch import current_stream, on_device
from ..driver.parameters import (
    BackwardParams,
    Pair,
    PostprocessParams,
    PreprocessParams,
    SinkGradientParams,
    SumPlaces,
    TilePlaces,
)
from ..driver.tensor_map import TensorMap
from ..driver.trouble import MOST_POLLS, raise_if_troubled, register_call, report_address
from ..tiles import helper_blocks, threads_per_row
from .backward_setup import DenseBackwardSetup, PackedBackwardSetup, dense_setup
from .few_workers import BackwardInLegs
from .layout import CallCache, DenseLayout, PackedLayout, empty_contiguous, kernel_scales, masked_score, row_strides
from .mask_bits import MaskBits, mask_bits
from .modified import BackwardModifiers
from .packed import PackedPlanner
from .tables import MaskOnDevice, mask_on_device, plan_on_device


def backward(call: Call, saved: Saved, grads: Grads) -> Gradients:
    prepared, tensors = _calls.find(call, grads.out, saved.out)
    return prepared.run(tensors, call, saved.lse, grads.lse)


class BackwardCall:
    """Everything about a call that does not change with the addresses of its tensors: what dense and packed calls share."""

    holds_tables: bool
    records = False  # by a kernel that notes when every task ran
    bits: MaskBits | None = None  # of a boolean mask

    def __init__(self, setup: DenseBackwardSetup | PackedBackwardSetup, tensors: tuple[Tensor, ...]) -> None:
        self.setup, self.layout, self.device = setup, setup.layout, tensors[0].device
        self.workspace, self.ordered, self.workers = setup.workspace, setup.options.ordered, setup.workers
        self.mask: MaskOnDevice = mask_on_device(setup.options.mask, self.layout.q_len, self.layout.kv_len, self.device)
        self.lock = threading.Lock()
        self._fill_parameters(tensors)
        self._prepare_launches()

    def _fill_parameters(self, tensors: tuple[Tensor, ...]) -> None:
        layout, options, tiles, head_tiles = self.layout, self.setup.options, self.setup.tiles, self.setup.head_tiles
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
            head_tiles=head_tiles,
        )
        self.before = PreprocessParams(
            out_strides=row_strides(out),
            grad_strides=row_strides(dout),
            v_dim=v.shape[-1],
            kv_rows=tiles.kv_rows,
            floats_to_zero=self.setup.dq_floats + self.setup.sum_floats,
            semaphore_count=self.setup.semaphores,
            tiles=places,
            mask=self.mask.params,
        )
        self.main = BackwardParams(
            most_polls=MOST_POLLS,
            call=register_call(layout.q_heads, head_tiles),
            first_sum=self.setup.dq_tiles,
            head_tiles=head_tiles,
            scale=options.scale,
            masked_score=masked_score(options),
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
            sums=SumPlaces(
                dk_dim=k.shape[-1],
                dv_dim=v.shape[-1],
                kv_heads=layout.kv_heads,
                kv_len=layout.kv_len,
                head_chains=self.setup.head_chains,
                count=self.setup.sums,
                first_sum=self.setup.dq_tiles,
            ),
        )
        self.sink = SinkGradientParams(sequences=layout.count, tiles=places)

    def _prepare_launches(self) -> None:
        setup, device = self.setup, self.layout.device
        kernels = setup.kernels(self.records)
        threads_before = setup.dq_tiles * setup.tiles.q_rows * threads_per_row(self.layout.backward_dims[1])
        self.preprocess = kernels.preprocess.load(device).prepare(helper_blocks(threads_before), [addressof(self.before)])
        notes = kernels.modifier_notes
        self.modifiers = None if notes is None else BackwardModifiers(self.layout, setup.options, notes, setup.dq_tiles)
        parameters = [self.main] if self.modifiers is None else [self.main, self.modifiers.params]
        arguments = [*(m.address for m in self.maps), *map(addressof, parameters)]
        attention = kernels.attention.load(device)
        self.attention = attention.prepare(self.workers, arguments, cooperative=setup.cooperative, early=not setup.cooperative)
        blocks = setup.dq_tiles + setup.sum_blocks
        self.postprocess = kernels.postprocess.load(device).prepare(blocks, [addressof(self.after)], early=True)
        self.sink_gradient = kernels.sink_gradient.load(device).prepare(self.layout.q_heads, [addressof(self.sink)])

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
                for tensor_map, tensor in zip(self.maps, (q, k, v, dout, dk, dv), strict=True):
                    tensor_map.point_to(tensor.data_ptr())
                self._point(at, out, dout, lse, (dq, dk, dv))
                self.before.grad_lse = None if dlse is None else dlse.data_ptr()
                held = None if self.bits is None else self.bits.give(self.main.mask, call.elements)
                self._plan_on_device(call.offsets, at, stream)
                lasting = []
                if self.modifiers is not None:
                    lasting = self.modifiers.launch(call.modifiers, self.before.tiles, at["modifier_notes"], stream)
                self.preprocess.on(stream)
                self.attention.on(stream)
                self.postprocess.on(stream)
                dsinks = None if call.sinks is None else self._sink_gradient(call.sinks, at, stream)
        del memory, held, lasting  # stream order keeps it alive long enough
        return self.layout.without_padding(dq, dk, dv, dsinks)

    def _point(self, at: dict[str, int], out: Tensor, dout: Tensor, lse: Tensor, gradients: tuple[Tensor, Tensor, Tensor]) -> None:
        before, main, after = self.before, self.main, self.after
        dq, dk, dv = (gradient.data_ptr() for gradient in gradients)
        before.out, before.grad_out, before.lse = out.data_ptr(), dout.data_ptr(), lse.data_ptr()
        before.lse_log2 = main.lse = at["lse"]
        before.delta = main.delta = at["delta"]
        before.semaphores = main.semaphores = after.semaphores = at["semaphores"]
        before.next_ticket = main.next_ticket = at["next_ticket"]
        before.tickets = main.tickets = at["tickets"]
        main.dq = after.dq_accumulator = at["dq"]
        before.dq_to_zero = None if self.ordered else at["dq"]
        after.dq = dq
        if self.setup.sums:
            main.sums = after.sums.sums = at["sums"]
            after.sums.dk, after.sums.dv = dk, dv

    def _plan_on_device(self, offsets: SequenceOffsets | None, at: dict[str, int], stream: Any) -> None:
        """Before the first pass: launch what plans on the device."""

    def _sink_gradient(self, sinks: Tensor, at: dict[str, int], stream: Any) -> Tensor:
        logits = sinks.detach().float().contiguous()
        gradient = torch.empty_like(logits)
        self.sink.sinks, self.sink.gradient = logits.data_ptr(), gradient.data_ptr()
        self.sink.lse_log2, self.sink.delta = at["lse"], at["delta"]
        self.sink_gradient.on(stream)
        return gradient.to(sinks.dtype)


class DenseBackward(BackwardCall):
    """Sequences of one length: the plan was made on the host and is on the device already."""

    holds_tables = True

    def __init__(self, setup: DenseBackwardSetup, tensors: tuple[Tensor, ...]) -> None:
        if setup.legs is not None:
            raise TooFewWorkers(setup.plan.schedule_name, setup.gang, setup.plan.workers, " Only a plain backward runs there.")
        super().__init__(setup, tensors)
        self.plan = setup.plan
        self.tables = plan_on_device(setup.plan, self.device)
        self.before.plan = self.tables.params
        self.before.plan.split = setup.split
        self.after.sums.parts = Pair(*setup.plan.parts_of_sums)
        self.main.runs, self.main.entries = self.tables.params.runs, self.tables.params.entries
        self.after.q_turns = self.tables.tables["q_turns"] if self.ordered else None
        self.bits = mask_bits(setup.plan.problem, False, self.device)


class PackedBackward(BackwardCall):
    """Packed sequences: two kernels plan on the device, before the others."""

    holds_tables = False

    def __init__(self, layout: PackedLayout, tensors: tuple[Tensor, ...], options: AttentionOptions) -> None:
        setup = PackedBackwardSetup(layout, options)
        mask = mask_on_device(options.mask, layout.q_len, layout.kv_len, tensors[0].device)
        self.planner = PackedPlanner(layout, mask, setup.head_tiles, setup.split, options)
        super().__init__(setup, tensors)

    def _plan_on_device(self, offsets: SequenceOffsets | None, at: dict[str, int], stream: Any) -> None:
        assert offsets is not None
        self.planner.launch(offsets, at, stream)
        for params in (self.before, self.after, self.sink):
            params.tiles.sequences, params.tiles.tile_places = at["sequences"], at["tile_places"]
        self.main.chains = at["chains"]
        self.after.sums.places = at["sum_places"]
        self.after.q_turns = at["q_turns"] if self.ordered else None


def prepare(
    layout: DenseLayout | PackedLayout, tensors: tuple[Tensor, ...], options: AttentionOptions
) -> DenseBackward | PackedBackward | BackwardInLegs:
    if isinstance(layout, PackedLayout):
        return PackedBackward(layout, tensors, options)
    setup = dense_setup(layout, options)
    return DenseBackward(setup, tensors) if setup.legs is None else BackwardInLegs(setup, tensors[0].device)


_calls = CallCache(prepare)
