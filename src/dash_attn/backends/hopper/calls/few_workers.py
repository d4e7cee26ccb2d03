"""A backward on a GPU, or a slice of one, with too few SMs for the gangs of its order. Same bits; many launches instead of one."""

from __future__ import annotations

import torch
from torch import Tensor

from ....call.offsets import SequenceOffsets
from .backward_setup import DenseBackwardSetup
from .device_backward import DeviceBackward, run_in_legs


class BackwardInLegs:
    """Sequences of one length, whose chains rest in memory between the legs of their walks."""

    holds_tables = True

    def __init__(self, setup: DenseBackwardSetup, device: torch.device) -> None:
        self.setup, self.device = setup, device

    def run(
        self, tensors: tuple[Tensor, ...], lse: Tensor, offsets: SequenceOffsets | None, sinks: Tensor | None, dlse: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        q, k, v, dout, out = tensors
        assert self.setup.legs is not None
        backward = run_in_legs(self.setup.plan, self.setup.legs, self.setup.options, (dout, q, k, v, out), (lse, dlse))
        dsinks = None if sinks is None else self._sink_gradient(backward, sinks)
        dq, dk, dv, dsinks = self.setup.layout.without_padding(*backward.finish(), dsinks)
        return dq, dk, dv, dsinks

    def _sink_gradient(self, backward: DeviceBackward, sinks: Tensor) -> Tensor:
        parts = backward.sink_gradients(backward.rows_of_sinks, sinks)
        total = torch.zeros_like(parts[0])
        for part in parts:  # of one sequence each, first to last as everywhere
            total += part
        return total.to(sinks.dtype)
