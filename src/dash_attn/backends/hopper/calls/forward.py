"""Launches the forward on the current stream."""

from __future__ import annotations

import threading
from ctypes import addressof
from typing import Any

import torch
from torch import Tensor

from ....call.call import Call, Saved
from ....call.offsets import SequenceOffsets
from ....call.options import AttentionOptions
from ..driver.launch import check, cuda_driver, current_stream, on_device
from ..driver.parameters import ForwardParams
from ..driver.stream_counters import prepare_counters, shared_counter
from ..driver.tensor_map import TensorMap
from ..driver.trouble import raise_if_troubled
from ..driver.workspace import Workspace
from ..support import sm_count
from .forward_setup import CONSUMER_ROWS, DenseForwardSetup, PackedForwardSetup
from .layout import CallCache, DenseLayout, PackedLayout, cut, empty_contiguous, kernel_scales
from .mask_bits import MaskBits, mask_bits
from .modified import ForwardModifiers
from .packed import PackedTiler
from .tables import mask_on_device, visits_on_device

CACHED_BYTES = 8 * 2**20  # K and V that stay in the L2 cache beside Q and the output
LAST_ROUNDS = 4  # Q tiles of the last heads per SM: enough to end together, the shortest last


def forward(call: Call) -> Saved:
    prepared, tensors = _calls.find(call)
    return prepared.run(tensors, call)


class ForwardCall:
    """Everything about a call that does not change with the addresses of its tensors: what dense and packed calls share."""

    holds_tables: bool
    some_attend_nothing = False  # rows that no CTA writes
    bits: MaskBits | None = None  # of a boolean mask

    def __init__(self, setup: DenseForwardSetup | PackedForwardSetup, tensors: tuple[Tensor, ...], workspace: Workspace) -> None:
        q, k, v = tensors
        layout, options = setup.layout, setup.options
        self.setup, self.layout, self.device, self.workspace = setup, layout, q.device, workspace
        self.mask = mask_on_device(options.mask, layout.q_len, layout.kv_len, q.device)
        self.params = ForwardParams(
            batch=layout.batch,
            q_heads=layout.q_heads,
            group=layout.group,
            tokens=layout.q_len,
            mask=self.mask.params,
            **kernel_scales(options),
        )
        self.out_shape = (*q.shape[:-1], v.shape[-1])
        self.out_like_q = self.out_shape == tuple(q.shape)
        self.lse_shape = layout.lse_shape
        out = q.new_empty(self.out_shape)
        boxes = ((q, CONSUMER_ROWS), (k, setup.kv_rows), (v, setup.kv_rows), (out, CONSUMER_ROWS))
        self.maps = [TensorMap(tensor, rows) for tensor, rows in boxes]
        self.modifiers = ForwardModifiers.of(layout, options)
        self._kernel = setup.kernel().load(layout.device)
        self.lock = threading.Lock()

    def _prepare_launch(self, tickets: int) -> int:
        """With a CTA for each ticket, if there are as many SMs. Returns the number of CTAs."""
        grid = max(1, min(sm_count(self.layout.device), tickets))
        parameters = [self.params] if self.modifiers is None else [self.params, self.modifiers.params]
        self.launch = self._kernel.prepare(grid, [*(m.address for m in self.maps), *map(addressof, parameters)])
        return grid

    def _heads_side_by_side(self, k: Tensor, v: Tensor, places: int) -> tuple[int, int]:
        """Of all heads, and of the last ones."""
        layout = self.layout
        bytes_per_head = layout.longest_keys * (k.shape[-1] + v.shape[-1]) * k.element_size() / layout.group
        heads, last = layout.batch * layout.q_heads, -(-LAST_ROUNDS * sm_count(layout.device) // max(1, places))
        return max(1, min(heads, int(CACHED_BYTES // bytes_per_head))), min(heads, last)

    def run(self, tensors: tuple[Tensor, ...], call: Call) -> Saved:
        raise_if_troubled()
        (q, k, v), sinks = tensors, call.sinks
        index = self.layout.device
        with on_device(index):
            out = empty_contiguous(q) if self.out_like_q else q.new_empty(self.out_shape)
            lse = torch.empty(self.lse_shape, dtype=torch.float32, device=self.device)
            logits = None if sinks is None else sinks.detach().float().contiguous()
            if self.some_attend_nothing:
                out.zero_()
                lse.fill_(-torch.inf) if logits is None else lse.copy_(logits[:, None].expand(self.lse_shape))
            stream = current_stream(index)
            memory, at = self._tickets(stream)
            with self.lock:  # the parameter structures are shared by all threads; a launch copies them
                for tensor_map, tensor in zip(self.maps, (q, k, v, out), strict=True):
                    tensor_map.point_to(tensor.data_ptr())
                params = self.params
                params.lse, params.sinks = lse.data_ptr(), None if logits is None else logits.data_ptr()
                params.next_ticket = at["next_ticket"]
                held = None if self.bits is None else self.bits.give(params.mask, call.elements)
                lasting = [] if self.modifiers is None else self.modifiers.point_to(call.modifiers)
                self._plan_on_device(call.offsets, at, stream)
                self.launch.on(stream)
        del memory, held, lasting  # stream order keeps it alive long enough
        return Saved(cut(out, self.layout.v_dim), lse)

    def _tickets(self, stream: Any) -> tuple[Tensor | None, dict[str, int]]:
        """Memory to keep until the launches are done, and the address of every part of it."""
        raise NotImplementedError

    def _plan_on_device(self, offsets: SequenceOffsets | None, at: dict[str, int], stream: Any) -> None:
        """Before the pass: launch what plans on the device."""


class DenseForward(ForwardCall):
    """Sequences of one length: which tiles a Q tile visits stands in a table on the device."""

    holds_tables = True

    def __init__(self, layout: DenseLayout, tensors: tuple[Tensor, ...], options: AttentionOptions) -> None:
        setup = DenseForwardSetup(layout, options)
        super().__init__(setup, tensors, Workspace(next_ticket=8))
        self.visits = visits_on_device(setup.problem, self.device)
        places = self.params.places = self.visits.places  # Q tiles of a head that visit anything
        self.params.visits = self.visits.params
        self.bits = mask_bits(setup.problem, True, self.device)
        self.some_attend_nothing = places < setup.problem.q_tiles
        # Where all Q tiles take the same time, taking one head after the other also ends together.
        even = bool(setup.problem.kept.all())
        side_by_side = (1, 1) if even else self._heads_side_by_side(tensors[1], tensors[2], places)
        self.params.heads_side_by_side, self.params.last_heads = side_by_side
        tickets = layout.batch * layout.q_heads * places
        # Each CTA takes one ticket too many, by which it knows that there are no more.
        self.params.last_ticket = tickets + self._prepare_launch(tickets) - 1
        prepare_counters(layout.device)

    def _tickets(self, stream: Any) -> tuple[Tensor | None, dict[str, int]]:
        counter = shared_counter(self.layout.device, int(stream))
        if counter is not None:
            return None, {"next_ticket": counter}
        memory, at = self.workspace.allocate(self.device)
        check(cuda_driver().cuMemsetD32Async(at["next_ticket"], 0, 1, stream))
        return memory, at


class PackedForward(ForwardCall):
    """Packed sequences: two kernels first lay out their tiles on the device. Tiles without visits are also written."""

    holds_tables = False

    def __init__(self, layout: PackedLayout, tensors: tuple[Tensor, ...], options: AttentionOptions) -> None:
        setup = PackedForwardSetup(layout, options)
        mask = mask_on_device(options.mask, layout.q_len, layout.kv_len, tensors[0].device)
        self.tiler = PackedTiler(layout, mask, setup.q_rows, setup.kv_rows)
        super().__init__(setup, tensors, Workspace(next_ticket=8, **self.tiler.sizes(layout)))
        places = self.tiler.room
        self.params.heads_side_by_side, self.params.last_heads = self._heads_side_by_side(tensors[1], tensors[2], places)
        self.params.last_ticket = 2**32 - 1  # their number is not known here
        self._prepare_launch(layout.q_heads * places)

    def _tickets(self, stream: Any) -> tuple[Tensor | None, dict[str, int]]:
        return self.workspace.allocate(self.device)  # the tiler resets them

    def _plan_on_device(self, offsets: SequenceOffsets | None, at: dict[str, int], stream: Any) -> None:
        assert offsets is not None
        self.tiler.launch(offsets, at, stream)
        self.params.sequences, self.params.tiles = at["sequences"], at["tiles"]


def prepare(layout: DenseLayout | PackedLayout, tensors: tuple[Tensor, ...], options: AttentionOptions) -> DenseForward | PackedForward:
    return PackedForward(layout, tensors, options) if isinstance(layout, PackedLayout) else DenseForward(layout, tensors, options)


_calls = CallCache(prepare)
