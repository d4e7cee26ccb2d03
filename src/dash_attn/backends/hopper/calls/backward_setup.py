"""What a backward is made of: tiles, plan, workspace, names of kernels. Shapes and options decide it, so no GPU is needed to tell.

The call that runs is built from it, and `explain` asks it.
"""

from __future__ import annotations

from functools import cached_property, lru_cache

from ....call.call import Call
from ....call.options import AttentionOptions
from ....call.planning import plan_for, plan_on_any
from ....masks import IntervalMask
from ....scheduling.plan import Plan
from ....scheduling.problem import Problem
from ....scheduling.ranks.units import SharedSchedule
from ..driver.parameters import ChainRecord, GroupSplit
from ..driver.workspace import Workspace
from ..support import check_gang, check_kinds, is_modified, sm_count
from ..tiles import backward_tiles
from .kernel_names import MODIFIER_NOTE_BYTES, PACKED, BackwardKernels, Variant, backward_kernels
from .layout import DenseLayout, Layout, PackedLayout
from .packed import largest_gang, packed_sizes
from .tables import kind_of


class BackwardSetup:
    """What dense and packed calls share."""

    gang: int  # chains that must be resident together
    workers: int
    mask_kind: str
    cooperative: bool  # gangs wait for each other: all their CTAs must be resident, also when other work shares the GPU
    parts: int  # of a group; of packed sequences, the most there can be
    kinds: int
    sums: int  # of dK and dV per KV tile; 0: a group is one part, whose chains finish them

    def __init__(self, layout: DenseLayout | PackedLayout, options: AttentionOptions) -> None:
        self.layout, self.options = layout, options
        self.tiles = backward_tiles(*layout.backward_dims)
        self.head_tiles = layout.tiles_of_queries(self.tiles.q_rows)
        self.dq_tiles = layout.batch * layout.q_heads * self.head_tiles
        self.head_chains = layout.tiles_of_keys(self.tiles.kv_rows)
        self.kv_tiles = layout.batch * layout.kv_heads * self.head_chains

    @property
    def chains(self) -> int:
        return self.kv_tiles * self.parts

    @property
    def dq_floats(self) -> int:
        return self.dq_tiles * self.tiles.q_rows * self.tiles.columns

    @property
    def sum_floats(self) -> int:
        """dK and dV in float32."""
        return self.kv_tiles * self.sums * self.tiles.kv_rows * sum(self.layout.backward_dims)

    @property
    def semaphores(self) -> int:
        return self.dq_tiles + self.kv_tiles * self.sums * self.tiles.sum_pieces

    @property
    def sum_blocks(self) -> int:
        """Of the postprocess: each finishes 64 rows of dV or of dK."""
        return 2 * self.kv_tiles * (self.tiles.kv_rows // 64) if self.sums else 0

    @property
    def split(self) -> GroupSplit:
        return GroupSplit(self.layout.group, self.parts, self.kinds, self.sums, self.tiles.sum_pieces, self.dq_tiles)

    @cached_property
    def workspace(self) -> Workspace:
        return Workspace(**self._sizes())

    def _sizes(self) -> dict[str, int]:
        """Row statistics, dQ in float32, dK and dV likewise where parts of a group sum them, semaphores and tickets: linear in tokens."""
        rows = self.dq_tiles * self.tiles.q_rows
        return {
            "lse": 4 * rows,
            "delta": 4 * rows,
            "dq": 4 * self.dq_floats,
            "sums": 4 * self.sum_floats,  # behind dQ: both are zeroed at once, where nothing is ordered
            "semaphores": 4 * self.semaphores,
            "next_ticket": 8,
            "tickets": ChainRecord.bytes() * self.chains,
            "modifier_notes": MODIFIER_NOTE_BYTES * self.dq_tiles if is_modified(self.options) else 0,
        }

    @property
    def variant(self) -> Variant:
        options = self.options
        modifiers = bool(options.dropout_p), options.alibi
        return Variant(self.layout.dtype, self.layout.backward_dims[0], bool(options.softcap), self.mask_kind, *modifiers)

    def kernels(self, record: bool = False) -> BackwardKernels:
        return backward_kernels(self.variant, self.layout.backward_dims[1], self.options.ordered, record)


class DenseBackwardSetup(BackwardSetup):
    """Of sequences of one length: the host has a plan."""

    def __init__(self, layout: DenseLayout, options: AttentionOptions, sms: int) -> None:
        super().__init__(layout, options)
        self.plan, self.legs = self._planned(sms)
        self.mask_kind = kind_of(self.plan.problem)
        check_kinds(self.plan.kinds)
        self.parts, self.kinds = self.plan.problem.parts, self.plan.kinds
        self.sums = self.plan.sums if self.parts > 1 else 0
        self.gang = self.plan.gang
        self.cooperative = self.gang > 1
        self.workers = min(self.plan.workers, self.chains)

    @property
    def any_workers(self) -> bool:
        """Whether chains can rest in memory, where SMs are too few for a gang. Unordered sums wait for nobody."""
        return (isinstance(self.options.mask, IntervalMask) and not is_modified(self.options)) or not self.options.ordered

    def _planned(self, workers: int) -> tuple[Plan, SharedSchedule | None]:
        """The legs of its walks where whole chains cannot run."""
        problem = self._problem(self.layout)
        if not self.any_workers:
            return plan_for(problem, self.options.schedule, workers), None
        planned = plan_on_any(problem, self.options.schedule, workers)
        return planned.plan, planned.legs if self.options.ordered else None

    def _problem(self, layout: DenseLayout | PackedLayout) -> Problem:
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
    kinds = 2

    def __init__(self, layout: PackedLayout, options: AttentionOptions) -> None:
        self._packed_layout = layout
        super().__init__(layout, options)
        self.parts, self.sums = layout.group, 2 if layout.group > 1 else 0
        self.gang = largest_gang(layout, self.tiles, options.mask)
        check_gang(self.gang, sm_count(layout.device))
        self.workers = min(sm_count(layout.device), self.chains)

    def _sizes(self) -> dict[str, int]:
        return {**super()._sizes(), **packed_sizes(self._packed_layout, self.head_tiles, self.head_chains)}


def backward_setup(call: Call) -> DenseBackwardSetup | PackedBackwardSetup:
    """Of a backward of these tensors, which are looked at for shape, dtype and device only."""
    layout = Layout.of(call)
    return PackedBackwardSetup(layout, call.options) if isinstance(layout, PackedLayout) else dense_setup(layout, call.options)


def dense_setup(layout: DenseLayout, options: AttentionOptions) -> DenseBackwardSetup:
    return _kept_setup(layout, options, sm_count(layout.device))


_kept_setup = lru_cache(maxsize=64)(DenseBackwardSetup)
