"""The forward: what it is made of, which shapes and options decide, so that no GPU is needed to tell; and its launch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from ctypes import addressof
from typing import Any

import torch
from torch import Tensor

from ....call.call import Call, Saved, cut
from ....call.options import AttentionOptions
from ....scheduling.problem import Problem
from ..driver.launch import check, cuda_driver, current_stream, on_device
from ..driver.parameters import ForwardParams
from ..driver.stream_counters import prepare_counters, shared_counter
from ..driver.tensor_map import TensorMap
from ..driver.trouble import raise_if_troubled
from ..driver.workspace import Workspace
from ..support import is_modified, sm_count
from ..tiles import CONSUMER_CHOICES, DECODE_ROWS, forward_dims, forward_tiles
from .few_queries import FewQueries
from .kernel_names import PACKED, KernelName, Variant, forward_kernel
from .layout import CallCache, Layout, PreparedForward, empty_contiguous
from .mask_bits import MaskBits
from .modified import ForwardModifiers
from .packed import PackedTiler
from .tables import kind_of, mask_on_device, masks_by_bits, visits_on_device

CONSUMER_ROWS = 64  # queries of a consumer warpgroup
FEW, MANY = 16, 512  # queries and keys of a sequence: with more queries, or fewer keys, the kernel for caches is no faster
LONG = 1024  # packed sequences from which three consumers pay; the bits are the same
CACHED_BYTES = 8 * 2**20  # K and V that stay in the L2 cache beside Q and the output
LAST_ROUNDS = 4  # Q tiles of the last heads per SM: enough to end together, the shortest last


def forward(call: Call) -> Saved:
    prepared, tensors = _calls.find(call)
    return prepared.run(tensors, call)


def prepared(call: Call) -> Callable[[], ForwardCall | FewQueries | None] | None:
    return _calls.weakly(call)


class ForwardSetup:
    """Tiles and kernel. `problem`: of sequences of one length."""

    def __init__(self, layout: Layout, options: AttentionOptions) -> None:
        self.layout, self.options = layout, options
        self.problem = None if layout.packed else forward_problem(layout, options)
        if self.problem is None:
            self.consumers, self.mask_kind = 3 if layout.dim == 64 and layout.longest[0] >= LONG else 2, PACKED
        else:
            self.consumers, self.mask_kind = self.problem.tile_q // CONSUMER_ROWS, kind_of(self.problem)
        self.tile = CONSUMER_ROWS * self.consumers, forward_tiles(layout.dim, self.consumers).kv_rows

    def kernel(self) -> KernelName:
        options, layout = self.options, self.layout
        dim, v_dim = (layout.dim, layout.dim) if is_modified(options) else forward_dims(layout.q_dim, layout.v_dim)
        return forward_kernel(Variant.of(layout.dtype, dim, options, self.mask_kind), self.consumers, v_dim)


def are_few(layout: Layout, options: AttentionOptions) -> bool:
    """Whether all queries of a sequence and a KV head are one unit of the kernel for caches."""
    queries, keys = layout.longest
    fits = queries <= FEW and queries * layout.group <= DECODE_ROWS and keys >= MANY
    return fits and options.mask.sides is not None and not is_modified(options)


def forward_problem(layout: Layout, options: AttentionOptions) -> Problem:
    """The tiling that visits least, by a fixed rule: like everything that decides bits, a function of one sequence alone."""
    problems = {
        layout.problem(options, CONSUMER_ROWS * consumers, forward_tiles(layout.dim, consumers).kv_rows): consumers * time
        for consumers, time in CONSUMER_CHOICES[layout.dim].items()
    }
    return min(problems, key=lambda problem: problems[problem] * int(problem.kept.sum()))


def forward_setup(call: Call) -> ForwardSetup:
    """Of a forward of these tensors, which are looked at for shape, dtype and device only."""
    return ForwardSetup(Layout.of(call), call.options)


class ForwardCall(PreparedForward):
    """Everything about a call that does not change with the addresses of its tensors."""

    def __init__(self, layout: Layout, tensors: tuple[Tensor, ...], options: AttentionOptions) -> None:
        q, k, v = tensors
        self.setup, self.layout, self.device = ForwardSetup(layout, options), layout, q.device
        self.holds_tables = not layout.packed
        self.mask = mask_on_device(options.mask, layout.q_len, layout.kv_len, q.device)
        self.tiler = PackedTiler(layout, self.mask, self.setup.tile) if layout.packed else None
        self.workspace = Workspace(next_ticket=8, **({} if self.tiler is None else self.tiler.sizes))
        self.params = ForwardParams(
            batch=layout.batch,
            q_heads=layout.q_heads,
            group=layout.group,
            tokens=layout.q_len,
            mask=self.mask.params,
            **options.kernel_scales,
        )
        self.out_shape = (*q.shape[:-1], v.shape[-1])
        self.out_like_q, self.padded = self.out_shape == tuple(q.shape), v.shape[-1] != layout.v_dim
        self.at: dict[str, int] = {}  # addresses of the last workspace
        self.lse_shape, self.lse_strides = layout.lse_shape, layout.lse_strides
        out = q.new_empty(self.out_shape)
        kv_rows = self.setup.tile[1]
        boxes = ((q, CONSUMER_ROWS), (k, kv_rows), (v, kv_rows), (out, CONSUMER_ROWS))
        self.maps = [TensorMap(tensor, rows) for tensor, rows in boxes]
        self.modifiers = ForwardModifiers(layout, options) if is_modified(options) else None
        self.some_attend_nothing = False  # rows that no CTA writes
        self.bits: MaskBits | None = None  # of a boolean mask
        kernel = self.setup.kernel().load(layout.device)
        self.lock = threading.Lock()
        tickets = self._give_visits(k, v) if self.tiler is None else self._leave_room(self.tiler, k, v)
        grid = max(1, min(sm_count(layout.device), tickets))  # a CTA for each ticket, if there are as many SMs
        # Each CTA takes one ticket too many, by which it knows that there are no more. That of packed sequences is not known here.
        self.params.last_ticket = tickets + grid - 1 if self.tiler is None else 2**32 - 1
        parameters = [self.params] if self.modifiers is None else [self.params, self.modifiers.params]
        self.launch = kernel.prepare(grid, [*(m.address for m in self.maps), *map(addressof, parameters)])
        if self.tiler is None:
            prepare_counters(layout.device)

    def _give_visits(self, k: Tensor, v: Tensor) -> int:
        """Sequences of one length: which tiles a Q tile visits stands in a table on the device. Returns the number of tickets."""
        problem = self.setup.problem
        assert problem is not None
        self.visits = visits_on_device(problem, self.device)
        places = self.params.places = self.visits.places  # Q tiles of a head that visit anything
        self.params.visits = self.visits.params
        if masks_by_bits(problem):
            self.bits = MaskBits(problem, True, self.device)
        self.some_attend_nothing = places < problem.q_tiles
        # Where all Q tiles take the same time, taking one head after the other also ends together.
        side_by_side = (1, 1) if problem.kept.all() else self._heads_side_by_side(k, v, places)
        self.params.heads_side_by_side, self.params.last_heads = side_by_side
        return self.layout.batch * self.layout.q_heads * places

    def _leave_room(self, tiler: PackedTiler, k: Tensor, v: Tensor) -> int:
        """Packed sequences: two kernels first lay out their tiles on the device. Tiles without visits are also written. Returns the most
        tickets there can be."""
        self.params.heads_side_by_side, self.params.last_heads = self._heads_side_by_side(k, v, tiler.head_tiles)
        return self.layout.q_heads * tiler.head_tiles

    def _heads_side_by_side(self, k: Tensor, v: Tensor, places: int) -> tuple[int, int]:
        """Of all heads, and of the last ones."""
        layout = self.layout
        bytes_per_head = (layout.longest[1] or 1) * (k.shape[-1] + v.shape[-1]) * k.element_size() / layout.group
        heads, last = layout.batch * layout.q_heads, -(-LAST_ROUNDS * sm_count(layout.device) // max(1, places))
        return max(1, min(heads, int(CACHED_BYTES // bytes_per_head))), min(heads, last)

    def run(self, tensors: tuple[Tensor, ...], call: Call) -> Saved:
        raise_if_troubled()
        (q, k, v), sinks = tensors, call.sinks
        index = self.layout.device
        with on_device(index):
            out = empty_contiguous(q) if self.out_like_q else q.new_empty(self.out_shape)
            lse = torch.empty_strided(self.lse_shape, self.lse_strides, dtype=torch.float32, device=self.device)
            logits = None if sinks is None else sinks.detach().float().contiguous()
            if self.some_attend_nothing:
                out.zero_()
                lse.fill_(-torch.inf) if logits is None else lse.copy_(logits[:, None].expand(self.lse_shape))
            stream = current_stream(index)
            with self.lock:  # the parameter structures are shared by all threads; a launch copies them
                for_q, for_k, for_v, for_out = self.maps
                for_q.point_to(q.data_ptr())
                for_k.point_to(k.data_ptr())
                for_v.point_to(v.data_ptr())
                for_out.point_to(out.data_ptr())
                params = self.params
                params.lse, params.sinks = lse.data_ptr(), None if logits is None else logits.data_ptr()
                held = None if self.bits is None else self.bits.give(params.mask, call.elements)
                lasting = [] if self.modifiers is None else self.modifiers.point_to(call.modifiers)
                if self.tiler is None:
                    memory, params.next_ticket = self._tickets(stream)
                else:
                    memory = self._lay_out(self.tiler, call, stream)
                self.launch.on(stream)
        del memory, held, lasting  # stream order keeps it alive long enough
        return Saved(cut(out, self.layout.v_dim) if self.padded else out, lse)

    def _tickets(self, stream: Any) -> tuple[Tensor | None, int]:
        """Memory to keep until the launches are done, and the address of the next ticket, which is 0."""
        counter = shared_counter(self.layout.device, int(stream))
        if counter is not None:
            return None, counter
        memory, at = self.workspace.allocate(self.device)
        check(cuda_driver().cuMemsetD32Async(at["next_ticket"], 0, 1, stream))
        return memory, at["next_ticket"]

    def _lay_out(self, tiler: PackedTiler, call: Call, stream: Any) -> Tensor:
        """Packed sequences: kernels lay out their tiles and reset the tickets. Returns memory to keep until the launches are done."""
        assert call.offsets is not None
        memory, at = self.workspace.allocate(self.device)
        if at is not self.at:
            self.at, params = at, self.params
            tiler.work_in(at)
            params.sequences, params.tiles, params.next_ticket = at["sequences"], at["tiles"], at["next_ticket"]
        tiler.launch(call.offsets, stream)
        return memory


def prepare(layout: Layout, tensors: tuple[Tensor, ...], options: AttentionOptions) -> ForwardCall | FewQueries:
    if not are_few(layout, options):
        return ForwardCall(layout, tensors, options)
    return FewQueries(layout, tensors, options, ForwardSetup(layout, options).tile)


_calls = CallCache(prepare)
