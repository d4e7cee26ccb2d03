"""What a backward is made of: tiles, sizes, plan, workspace, names of kernels. Shapes and options decide it, so no GPU is needed to tell.

The call that runs is built from it, and `explain` asks it. Its kernels' parameters, as far as sizes decide them, are filled in here.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from torch import Tensor

from ....call.call import Call
from ....call.options import AttentionOptions
from ....call.planning import plan_for, plan_on_any
from ....masks import IntervalMask
from ....scheduling.plan import Plan
from ....scheduling.ranks.units import SharedSchedule
from ..driver.parameters import (
    BackwardParams,
    ChainRecord,
    GroupSplit,
    MaskParams,
    PostprocessParams,
    PreprocessParams,
    SumPlaces,
    TilePlaces,
)
from ..driver.trouble import MOST_POLLS, register_call, report_address
from ..driver.workspace import Workspace
from ..support import check_gang, check_kinds, is_modified, sm_count
from ..tiles import BackwardTiles, backward_tiles
from .kernel_names import MODIFIER_NOTE_BYTES, PACKED, BackwardKernels, Variant, backward_kernels
from .layout import Layout, masked_score, row_strides
from .packed import largest_gang, packed_sizes
from .tables import kind_of


@dataclass(frozen=True)
class Sizes:
    """How many tiles, sums and states there is room for: of a call, or of one of several ranks that share a sequence."""

    batch: int
    q_heads: int
    kv_heads: int
    rows: int  # of queries
    keys: int
    q_tiles: int  # of a query head
    kv_tiles: int  # of a KV head
    sums: int  # of dK and dV per KV tile; 0: a group is one part, whose chains finish them
    pieces: int  # of a sum or state, each with a semaphore
    states: int = 0  # behind all legs of a rank

    @property
    def dq_tiles(self) -> int:
        return self.batch * self.q_heads * self.q_tiles

    @property
    def all_kv_tiles(self) -> int:
        return self.batch * self.kv_heads * self.kv_tiles

    @property
    def all_sums(self) -> int:
        return self.all_kv_tiles * self.sums

    @property
    def first_sum(self) -> int:
        """Semaphores of dQ tiles come first, then those of states, leg by leg, then those of sums."""
        return self.dq_tiles + self.states * self.pieces

    @property
    def semaphores(self) -> int:
        return self.first_sum + self.all_sums * self.pieces

    def postprocess_blocks(self, tiles: BackwardTiles) -> int:
        """Each finishes a dQ tile, or 64 rows of dV or of dK where these are summed."""
        return self.dq_tiles + (2 * self.all_kv_tiles * (tiles.kv_rows // 64) if self.sums else 0)


def workspace_sizes(sizes: Sizes, tiles: BackwardTiles, dims: tuple[int, int]) -> dict[str, int]:
    """Row statistics, dQ in float32, dK and dV likewise where they are summed, semaphores: linear in tokens. dims: those of the kernels,
    of q and k and of v."""
    rows = sizes.dq_tiles * tiles.q_rows
    return {
        "lse": 4 * rows,
        "delta": 4 * rows,
        "dq": 4 * rows * tiles.columns,
        "sums": 4 * sizes.all_sums * tiles.kv_rows * sum(dims),  # behind dQ: both are zeroed at once, where nothing is ordered
        "semaphores": 4 * sizes.semaphores,
        "next_ticket": 8,
    }


class Parameters:
    """Of the kernels before, in and after the attention of a backward."""

    def __init__(self, sizes: Sizes, tiles: BackwardTiles, options: AttentionOptions, mask: MaskParams, tokens: int = 0) -> None:
        """tokens: of packed sequences."""
        self.places = TilePlaces(
            batch=sizes.batch,
            q_heads=sizes.q_heads,
            group=sizes.q_heads // sizes.kv_heads,
            q_len=sizes.rows,
            tokens=tokens,
            head_tiles=sizes.q_tiles,
        )
        shared = {"report": report_address(), "most_polls": MOST_POLLS, "call": register_call(sizes.q_heads, sizes.q_tiles)}
        self.before = PreprocessParams(semaphore_count=sizes.semaphores, kv_rows=tiles.kv_rows, tiles=self.places, mask=mask)
        self.main = BackwardParams(
            head_tiles=sizes.q_tiles,
            scale=options.scale,
            masked_score=masked_score(options),
            mask=mask,
            **shared,
            **options.kernel_scales,
        )
        sums = SumPlaces(
            kv_heads=sizes.kv_heads,
            kv_len=sizes.keys,
            head_chains=sizes.kv_tiles,
            count=sizes.sums,
            first_sum=sizes.first_sum,
        )
        self.after = PostprocessParams(scale=options.scale, tiles=self.places, sums=sums, **shared)

    def take_shapes(self, q: Tensor, out: Tensor, dout: Tensor) -> None:
        """Head dims and strides."""
        self.before.out_strides, self.before.grad_strides = row_strides(out), row_strides(dout)
        self.after.dim = self.after.sums.dk_dim = q.shape[-1]
        self.before.v_dim = self.after.sums.dv_dim = dout.shape[-1]

    def read(self, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None) -> None:
        """What there is of each row."""
        before = self.before
        before.out, before.grad_out, before.lse = out.data_ptr(), dout.data_ptr(), lse.data_ptr()
        before.grad_lse = None if dlse is None else dlse.data_ptr()

    def work_in(self, at: dict[str, int]) -> None:
        before, main, after = self.before, self.main, self.after
        before.lse_log2 = main.lse = at["lse"]
        before.delta = main.delta = at["delta"]
        before.semaphores = main.semaphores = after.semaphores = at["semaphores"]
        before.next_ticket = main.next_ticket = at["next_ticket"]
        main.dq = after.dq_accumulator = at["dq"]


class BackwardSetup:
    """Of sequences of one length the host has a plan. Packed ones are planned on the device, so there must be room for the largest gang
    that lengths may give."""

    def __init__(self, layout: Layout, options: AttentionOptions, sms: int) -> None:
        self.layout, self.options = layout, options
        self.tiles = backward_tiles(*layout.backward_dims)
        self.plan: Plan | None = None
        self.legs: SharedSchedule | None = None
        if not layout.packed:
            self.plan, self.legs = self._planned(sms)
        if self.plan is None:
            self.mask_kind, self.kinds, self.parts, sums, workers = PACKED, 2, layout.group, 2, sms
            self.gang = largest_gang(layout, self.tiles, options.mask)  # chains that must be resident together
            check_gang(self.gang, sms)
        else:
            check_kinds(self.plan.kinds)
            self.mask_kind, self.kinds, self.parts = kind_of(self.plan.problem), self.plan.kinds, self.plan.problem.parts
            self.gang, sums, workers = self.plan.gang, self.plan.sums, self.plan.workers
        # Gangs wait for each other: all their CTAs must be resident, also when other work shares the GPU.
        self.cooperative = layout.packed or self.gang > 1
        self.sizes = Sizes(
            batch=layout.batch,
            q_heads=layout.q_heads,
            kv_heads=layout.kv_heads,
            rows=layout.q_len,
            keys=layout.kv_len,
            q_tiles=layout.tiles(layout.q_len, self.tiles.q_rows),
            kv_tiles=layout.tiles(layout.kv_len, self.tiles.kv_rows),
            sums=sums if self.parts > 1 else 0,
            pieces=self.tiles.sum_pieces,
        )
        self.chains = self.sizes.all_kv_tiles * self.parts  # of packed sequences, the most there can be
        self.workers = min(workers, self.chains)

    @property
    def any_workers(self) -> bool:
        """Whether chains can rest in memory, where SMs are too few for a gang. Unordered sums wait for nobody."""
        return (isinstance(self.options.mask, IntervalMask) and not is_modified(self.options)) or not self.options.ordered

    def _planned(self, workers: int) -> tuple[Plan, SharedSchedule | None]:
        """The legs of its walks where whole chains cannot run."""
        problem = self.layout.problem(self.options, self.tiles.q_rows, self.tiles.kv_rows)
        if not self.any_workers:
            return plan_for(problem, self.options.schedule, workers), None
        planned = plan_on_any(problem, self.options.schedule, workers)
        return planned.plan, planned.legs if self.options.ordered else None

    @property
    def split(self) -> GroupSplit:
        sizes = self.sizes
        return GroupSplit(self.layout.group, self.parts, self.kinds, sizes.sums, sizes.pieces, sizes.dq_tiles)

    @cached_property
    def memory(self) -> dict[str, int]:
        """Bytes of the workspace: with tickets, notes of modifiers and, of packed sequences, their tables."""
        layout, sizes = self.layout, self.sizes
        return {
            **workspace_sizes(sizes, self.tiles, layout.backward_dims),
            "tickets": ChainRecord.bytes() * self.chains,
            "modifier_notes": MODIFIER_NOTE_BYTES * sizes.dq_tiles if is_modified(self.options) else 0,
            **(packed_sizes(layout, sizes.q_tiles, sizes.kv_tiles) if layout.packed else {}),
        }

    @cached_property
    def workspace(self) -> Workspace:
        return Workspace(**self.memory)

    @property
    def variant(self) -> Variant:
        return Variant.of(self.layout.dtype, self.layout.backward_dims[0], self.options, self.mask_kind)

    def kernels(self, record: bool = False) -> BackwardKernels:
        return backward_kernels(self.variant, self.layout.backward_dims[1], self.options.ordered, record)


def backward_setup(call: Call) -> BackwardSetup:
    """Of a backward of these tensors, which are looked at for shape, dtype and device only."""
    return setup_of(Layout.of(call), call.options)


def setup_of(layout: Layout, options: AttentionOptions) -> BackwardSetup:
    return _kept_setup(layout, options, sm_count(layout.device))


_kept_setup = lru_cache(maxsize=64)(BackwardSetup)
