"""What one recorded tensor is: where in a step it was, and its dtype and shape. Its bits are in the record of the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# The order in which a step runs. `recompute`: a forward inside the backward (activation checkpointing).
PHASES = ("batch", "forward", "loss", "backward", "recompute", "gradient", "weight", "optimizer", "rng")


@dataclass(frozen=True)
class Entry:
    """`module` is the name in the model, "" the model itself; `call` counts its calls within the step.

    role: "input", "output", "parameter" or "buffer" of a module; elsewhere "".
    caller: the module that ran when the tensor was seen; None outside of all.
    takers: modules that took the tensor as input, outermost first. Known for gradients in the backward.
    """

    phase: str
    module: str
    tensor: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    kept: int = 0
    role: str = ""
    call: int = 0
    caller: str | None = None
    takers: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """Equal for the same tensor in two runs."""
        return self.phase, self.module, self.role, self.tensor, self.call

    def of(self, tensor: Tensor, keep: int) -> Entry:
        """With what a tensor is."""
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        return Entry(**{**self.__dict__, "dtype": dtype, "shape": shape, "kept": min(keep, tensor.numel())})

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"this version of PyTorch has no dtype {self.dtype!r}")
        return dtype

    @property
    def kept_bytes(self) -> int:
        return self.kept * self.torch_dtype.itemsize

    def to_json(self) -> list[Any]:
        fields = (self.phase, self.module, self.tensor, self.dtype, list(self.shape), self.kept, self.role, self.call, self.caller)
        return [*fields, list(self.takers)]

    @classmethod
    def from_json(cls, fields: list[Any]) -> Entry:
        phase, module, tensor, dtype, shape, kept, role, call, caller, takers = fields
        return cls(phase, module, tensor, dtype, tuple(shape), kept, role, call, caller, tuple(takers))
