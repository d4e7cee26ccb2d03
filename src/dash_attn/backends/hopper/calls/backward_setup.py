"""What a backward is made of: tiles, plan, workspace, names of kernels. Shapes and options decide it, so no GPU is needed to tell.

The call that runs is built from it, and `explain` asks it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ....call.offsets import SequenceOffsets
from ....call.options import AttentionOptions
from ....call.planning import plan_for
from ....scheduling.problem import Problem
from ..device.parameters import ChainRecord
from ..device.workspace import Workspace
from ..support import check_gang, check_kinds, sm_count
from ..tiles import backward_tiles
from .groups import split
from .kernel_names import PACKED, BackwardKernels, Variant, backward_kernels
from .layout import DenseLayout, Layout, PackedLayout
from .packed import largest_gang, packed_sizes
from .tables import mask_kind


class BackwardSetup:
    """What dense and packed calls share."""

    gang: int  # chains that must be resident together
    workers: int
    mask_kind: str
    cooperative: bool  # gangs wait for each other: all their CTAs must be resident, also when other work shares the GPU

    def __init__(self, layout: DenseLayout | PackedLayout, options: AttentionOptions) -> None:
        self.layout, self.options = layout, options
        self.tiles = backward_tiles(layout.dim)
        self.head_tiles = layout.tiles_of_queries(self.tiles.q_rows)
        self.dq_tiles = layout.batch * layout.q_heads * self.head_tiles
        self.head_chains = layout.batch * layout.tiles_of_keys(self.tiles.kv_rows)
        self.chains = self.head_chains * layout.kv_heads
        self.workspace = Workspace(**self._sizes())

    def _sizes(self) -> dict[str, int]:
        """Row statistics, dQ in float32, semaphores and tickets: linear in tokens."""
        rows = self.dq_tiles * self.tiles.q_rows
        return {
            "lse": 4 * rows,
            "delta": 4 * rows,
            "dq": 4 * rows * self.tiles.columns,
            "semaphores": 4 * self.dq_tiles,
            "next_ticket": 8,
            "tickets": ChainRecord.bytes() * self.chains,
        }

    def kernels(self, record: bool = False) -> BackwardKernels:
        variant = Variant(self.layout.dtype, self.layout.dim, bool(self.options.softcap), self.mask_kind)
        return backward_kernels(variant, self.options.ordered, record)


class DenseBackwardSetup(BackwardSetup):
    """Of sequences of one length: the host has a plan."""

    def __init__(self, layout: DenseLayout, options: AttentionOptions) -> None:
        super().__init__(layout, options)
        self.mask_kind = mask_kind(options.mask)
        self.plan = plan_for(self._problem(layout), options.schedule, sm_count(layout.device))
        check_kinds(self.plan.kinds)
        self.gang = self.plan.gang
        self.cooperative = self.gang > 1
        self.workers = min(self.plan.workers, self.chains)

    def _problem(self, layout: DenseLayout) -> Problem:
        return Problem(
            self.options.mask,
            layout.q_len,
            layout.kv_len,
            tile_q=self.tiles.q_rows,
            tile_kv=self.tiles.kv_rows,
            heads=layout.kv_heads,
            group=layout.group,
            batch=layout.batch,
            head_offset=self.options.head_offset,
        )


class PackedBackwardSetup(BackwardSetup):
    """Of packed sequences: the device plans, so there must be room for the largest gang that lengths may give."""

    mask_kind = PACKED
    cooperative = True

    def __init__(self, layout: PackedLayout, options: AttentionOptions) -> None:
        self._packed_layout = layout
        super().__init__(layout, options)
        self.gang = largest_gang(layout, self.tiles, options.mask)
        check_gang(self.gang, sm_count(layout.device))
        self.workers = min(sm_count(layout.device), self.chains)

    def _sizes(self) -> dict[str, int]:
        return {**super()._sizes(), **packed_sizes(self._packed_layout, self.head_tiles, self.head_chains)}


def dense_setup(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> DenseBackwardSetup:
    """Of a backward of these tensors, which are looked at for shape, dtype and device only. Large groups are split."""
    layout, of_parts = _split_layout((q, k, v), options, None)
    assert isinstance(layout, DenseLayout)
    return DenseBackwardSetup(layout, of_parts)


def packed_setup(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, offsets: SequenceOffsets) -> PackedBackwardSetup:
    layout, of_parts = _split_layout((q, k, v), options, offsets)
    assert isinstance(layout, PackedLayout)
    return PackedBackwardSetup(layout, of_parts)


def _split_layout(tensors: tuple[Tensor, Tensor, Tensor], options: AttentionOptions, offsets: SequenceOffsets | None) -> Any:
    many_k, many_v, of_parts = split(*tensors, options, shapes_only=True)
    return Layout.of((tensors[0], many_k, many_v), of_parts, offsets), of_parts
