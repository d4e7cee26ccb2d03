"""A backward on a GPU, or a slice of one, with too few SMs for the gangs of its order. Same bits; many launches instead of one."""

from __future__ import annotations

import torch
from torch import Tensor

from ....call.call import Call, Gradients, sum_in_order
from ....call.planning import walk_in_legs
from ....scheduling.ranks.units import most_states
from ..driver.workspace import Workspace
from .backward_setup import DenseBackwardSetup
from .kernel_names import LegKernels, leg_kernels
from .leg_tables import LegTables, workspace_sizes
from .rank_backward import RankBackward, tile_size


class LegSetup:
    """What such a backward is made of. Shapes and options decide it, so no GPU is needed to tell."""

    def __init__(self, setup: DenseBackwardSetup) -> None:
        assert setup.legs is not None
        self.setup, self.legs = setup, setup.legs
        self.tables = LegTables(setup.plan, setup.legs, 0, setup.tiles)

    @property
    def tables_bytes(self) -> int:
        return sum(table.nbytes for table in self.tables.tables.values())

    @property
    def workspace_bytes(self) -> int:
        """With the states that rest in memory, or are worked on, at once."""
        dims, tiles = self.setup.layout.backward_dims, self.setup.tiles
        lasting = Workspace(**workspace_sizes(self.tables.sizes, tiles, dims)).bytes
        return lasting + 4 * most_states(self.legs)[0] * tile_size(*dims)

    def kernels(self) -> LegKernels:
        return leg_kernels(self.setup.variant, self.setup.layout.backward_dims[1])


class BackwardInLegs:
    """Sequences of one length, whose chains rest in memory between the legs of their walks."""

    holds_tables = True

    def __init__(self, setup: DenseBackwardSetup, device: torch.device) -> None:
        self.setup, self.device = setup, device

    def run(self, tensors: tuple[Tensor, ...], call: Call, lse: Tensor, dlse: Tensor | None) -> Gradients:
        (q, k, v, dout, out), sinks = tensors, call.sinks
        assert self.setup.legs is not None
        backward = RankBackward(self.setup.plan, self.setup.legs, 0, self.setup.options, (dout, q, out), (lse, dlse))
        backward.take_keys(k, v, 0)
        walk_in_legs(backward, self.setup.legs)
        dsinks = None
        if sinks is not None:
            dsinks = sum_in_order(backward.sink_gradients(backward.rows_of_sinks, sinks)).to(sinks.dtype)
        return self.setup.layout.without_padding(*backward.finish(), dsinks)
