"""Launches the forward on the current stream."""

from __future__ import annotations

import threading
from ctypes import addressof
from typing import Any

import torch
from torch import Tensor

from ....call.offsets import SequenceOffsets
from ....call.options import AttentionOptions
from ....call.planning import problem_of
from ....scheduling.problem import Problem
from ..device.driver import LoadedKernel, check, cuda_driver, current_stream, flag, load_kernel, on_device
from ..device.parameters import ForwardParams
from ..device.stream_counters import prepare_counters, shared_counter
from ..device.tensor_map import TensorMap
from ..device.trouble import raise_if_troubled
from ..device.workspace import Workspace
from ..support import sm_count
from ..tiles import KERNEL_DIMS, forward_tiles, kernel_dim
from .layout import CallCache, Layout, cut, empty_contiguous, kernel_scales
from .packed import PackedTiler
from .tables import mask_on_device, visits_on_device

CONSUMER_ROWS = 64  # queries of a consumer warpgroup
# Head dim 64 has room for three consumers, which run faster per element but cover short and masked sequences worse.
# Consumers: time per element, relative.
CONSUMER_CHOICES = {64: {2: 1.1, 3: 1.0}, **{dim: {2: 1.0} for dim in KERNEL_DIMS[1:]}}
LONG = 1024  # packed sequences from which three consumers pay; the bits are the same
CACHED_BYTES = 8 * 2**20  # K and V that stay in the L2 cache beside Q and the output
LAST_ROUNDS = 4  # Q tiles an SM gets of the last heads: enough to end together, the shortest last


def forward(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, offsets: SequenceOffsets | None = None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output and LSE."""
    call, tensors = _calls.find((q, k, v), options, offsets)
    return call.run(tensors, offsets, sinks)


def forward_kernel(device: int, dtype: str, dim: int, consumers: int, softcap: bool, mask_kind: str) -> LoadedKernel:
    name = f"attention_forward<{dtype}, {dim}, {consumers}, {flag(softcap)}, MaskKind::{mask_kind}>"
    return load_kernel(device, "forward/attention.cuh", name, 128 * (consumers + 1), forward_tiles(dim, consumers).shared_bytes)


def forward_problem(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Problem:
    """The tiling that visits least, by a fixed rule: like everything that decides bits, a function of one sequence alone."""
    dim = kernel_dim(q.shape[-1], v.shape[-1])
    costs = CONSUMER_CHOICES[dim]
    problems = {problem_of(q, k, options, CONSUMER_ROWS * c, forward_tiles(dim, c).kv_rows): c * time for c, time in costs.items()}
    return min(problems, key=lambda problem: problems[problem] * int(problem.kept.sum()))


def packed_consumers(layout: Layout) -> int:
    return 3 if layout.dim == 64 and (layout.q_longest or 0) >= LONG else 2


class ForwardCall:
    """Everything about a call that does not change with the addresses of its tensors."""

    def __init__(self, layout: Layout, tensors: tuple[Tensor, ...], options: AttentionOptions) -> None:
        q, k, v = tensors
        self.layout, self.device = layout, q.device
        self.mask = mask_on_device(options.mask, layout.q_len, layout.kv_len, q.device)
        self.params = ForwardParams(
            batch=layout.batch,
            q_heads=layout.q_heads,
            group=layout.group,
            tokens=layout.q_len,
            mask=self.mask.params,
            **kernel_scales(options),
        )
        self.tiler: PackedTiler | None = None
        consumers, places = self._place_packed() if layout.packed else self._place(q, k, v, options)
        kind = "Packed" if layout.packed else self.mask.kind
        kernel = forward_kernel(layout.device, layout.dtype, layout.dim, consumers, bool(options.softcap), kind)
        self.params.heads_side_by_side, self.params.last_heads = self._heads_side_by_side(k, v, places)
        tickets = layout.batch * layout.q_heads * places
        grid = max(1, min(sm_count(layout.device), tickets))
        # Each CTA takes one ticket too many, by which it knows that there are no more. Packed: their number is not known here.
        self.params.last_ticket = 2**32 - 1 if layout.packed else tickets + grid - 1
        self.out_shape = (*q.shape[:-1], v.shape[-1])
        self.out_like_q = self.out_shape == tuple(q.shape)
        self.lse_shape = (layout.q_heads, layout.q_len) if layout.packed else (layout.batch, layout.q_heads, layout.q_len)
        kv_rows = forward_tiles(layout.dim, consumers).kv_rows
        out = q.new_empty(self.out_shape)
        boxes = ((q, CONSUMER_ROWS), (k, kv_rows), (v, kv_rows), (out, CONSUMER_ROWS))
        self.maps = [TensorMap(tensor, rows) for tensor, rows in boxes]
        self.launch = kernel.prepare(grid, [*(m.address for m in self.maps), addressof(self.params)])
        self.holds_tables = not layout.packed
        self.lock = threading.Lock()

    def _heads_side_by_side(self, k: Tensor, v: Tensor, places: int) -> tuple[int, int]:
        """Of all heads, and of the last ones. Where all Q tiles take the same time, one head after the other ends together, too."""
        if self.even:
            return 1, 1
        layout = self.layout
        longest = layout.k_longest if layout.packed else layout.kv_len
        bytes_per_head = (longest or 1) * (k.shape[-1] + v.shape[-1]) * k.element_size() / layout.group
        heads, last = layout.batch * layout.q_heads, -(-LAST_ROUNDS * sm_count(layout.device) // max(1, places))
        return max(1, min(heads, int(CACHED_BYTES // bytes_per_head))), min(heads, last)

    def _place(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[int, int]:
        """Consumers, and Q tiles of a head that visit anything."""
        problem = forward_problem(q, k, v, options)
        self.visits = visits_on_device(problem, self.device)
        self.params.places, self.params.visits = self.visits.places, self.visits.params
        self.some_attend_nothing = self.visits.places < problem.q_tiles
        self.even = bool(problem.kept.all())
        self.workspace = Workspace(next_ticket=8)
        prepare_counters(self.layout.device)
        return problem.tile_q // CONSUMER_ROWS, self.visits.places

    def _place_packed(self) -> tuple[int, int]:
        layout = self.layout
        consumers = packed_consumers(layout)
        self.tiler = PackedTiler(layout, self.mask, CONSUMER_ROWS * consumers, forward_tiles(layout.dim, consumers).kv_rows)
        self.workspace = Workspace(next_ticket=8, **self.tiler.sizes(layout))
        self.some_attend_nothing = self.even = False  # tiles without visits are written, too
        return consumers, self.tiler.room

    def run(self, tensors: tuple[Tensor, ...], offsets: SequenceOffsets | None, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        raise_if_troubled()
        q, k, v = tensors
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
                if self.tiler is not None and offsets is not None:
                    self.tiler.launch(offsets, at, stream)
                    params.sequences, params.tiles = at["sequences"], at["tiles"]
                self.launch.on(stream)
        del memory  # stream order keeps it alive long enough
        return cut(out, self.layout.v_dim), lse

    def _tickets(self, stream: Any) -> tuple[Tensor | None, dict[str, int]]:
        """Memory to keep until the launches are done, and the address of every part of it."""
        if self.tiler is not None:  # it resets them
            return self.workspace.allocate(self.device)
        counter = shared_counter(self.layout.device, int(stream))
        if counter is not None:
            return None, {"next_ticket": counter}
        memory, at = self.workspace.allocate(self.device)
        check(cuda_driver().cuMemsetD32Async(at["next_ticket"], 0, 1, stream))
        return memory, at


_calls = CallCache(ForwardCall)
