"""What a forward is made of: tiles, workspace, the name of its kernel. Shapes and options decide it, so no GPU is needed to tell."""

from __future__ import annotations

from ....call.call import Call
from ....call.options import AttentionOptions
from ....scheduling.problem import Problem
from ..tiles import CONSUMER_CHOICES, forward_dims, forward_tiles
from .kernel_names import PACKED, KernelName, Variant, forward_kernel
from .layout import DenseLayout, Layout, PackedLayout
from .tables import kind_of

CONSUMER_ROWS = 64  # queries of a consumer warpgroup
LONG = 1024  # packed sequences from which three consumers pay; the bits are the same


class ForwardSetup:
    """What dense and packed calls share."""

    def __init__(self, layout: DenseLayout | PackedLayout, options: AttentionOptions, consumers: int, mask_kind: str) -> None:
        self.layout, self.options, self.consumers, self.mask_kind = layout, options, consumers, mask_kind
        self.q_rows, self.kv_rows = CONSUMER_ROWS * consumers, forward_tiles(layout.dim, consumers).kv_rows

    def kernel(self) -> KernelName:
        options, layout = self.options, self.layout
        modifiers = bool(options.dropout_p), options.alibi
        dim, v_dim = (layout.dim, layout.dim) if any(modifiers) else forward_dims(layout.q_dim, layout.v_dim)
        return forward_kernel(Variant(layout.dtype, dim, bool(options.softcap), self.mask_kind, *modifiers), self.consumers, v_dim)


class DenseForwardSetup(ForwardSetup):
    def __init__(self, layout: DenseLayout, options: AttentionOptions) -> None:
        self.problem = forward_problem(layout, options)
        super().__init__(layout, options, self.problem.tile_q // CONSUMER_ROWS, kind_of(self.problem))


class PackedForwardSetup(ForwardSetup):
    def __init__(self, layout: PackedLayout, options: AttentionOptions) -> None:
        super().__init__(layout, options, 3 if layout.dim == 64 and layout.q_longest >= LONG else 2, PACKED)


def forward_problem(layout: DenseLayout, options: AttentionOptions) -> Problem:
    """The tiling that visits least, by a fixed rule: like everything that decides bits, a function of one sequence alone."""
    costs = CONSUMER_CHOICES[layout.dim]
    problems = {_problem(layout, options, consumers): consumers * time for consumers, time in costs.items()}
    return min(problems, key=lambda problem: problems[problem] * int(problem.kept.sum()))


def _problem(layout: DenseLayout, options: AttentionOptions, consumers: int) -> Problem:
    return Problem(
        options.mask,
        layout.q_len,
        layout.kv_len,
        tile_q=CONSUMER_ROWS * consumers,
        tile_kv=forward_tiles(layout.dim, consumers).kv_rows,
        heads=layout.kv_heads,
        group=layout.group,
        batch=layout.batch,
        head_offset=options.head_offset,
    )


def forward_setup(call: Call) -> ForwardSetup:
    """Of a forward of these tensors, which are looked at for shape, dtype and device only."""
    layout = Layout.of(call)
    return PackedForwardSetup(layout, call.options) if isinstance(layout, PackedLayout) else DenseForwardSetup(layout, call.options)
