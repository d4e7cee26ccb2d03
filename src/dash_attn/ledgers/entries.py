"""What one recorded tensor is: where in a step it was, its dtype and shape; and its elements that were kept, as numbers.

The sum over its bits is in the record of the step.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # ledgers are read and compared without PyTorch
    import torch
    from torch import Tensor

# The order in which a step runs. `recompute`: a forward inside the backward (activation checkpointing).
PHASES = ("batch", "forward", "loss", "backward", "recompute", "gradient", "weight", "optimizer", "rng")
DETAIL = ("forward", "backward", "recompute")  # phases of modules, recorded at some steps
SETTING, COUNT = "setting", "count"  # roles of what is recorded of an optimizer at every step


@dataclass(frozen=True)
class Entry:
    """`module` is the name in the model, "" the model itself; `call` counts its calls within the step.

    role: "input", "output", "parameter" or "buffer" of a module, "setting" or "count" of the optimizer; elsewhere "".
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

    def of(self, name: str, tensor: Tensor, keep: int) -> Entry:
        """With what a tensor is. `name`: of the tensor, where it is a part of another one."""
        kept = min(keep, tensor.numel()) if keep else 0
        return _described(self, name, tensor.dtype, tensor.shape, kept)

    @property
    def itemsize(self) -> int:
        """Bytes of an element: names of dtypes have their bits, and those below a byte are stored in one."""
        bits = re.match(r"[a-z]+(\d+)", self.dtype)
        return 1 if bits is None else max(1, int(bits[1]) // 8)

    @property
    def kept_bytes(self) -> int:
        return self.kept * self.itemsize

    def to_json(self) -> list[Any]:
        fields = (self.phase, self.module, self.tensor, self.dtype, list(self.shape), self.kept, self.role, self.call, self.caller)
        return [*fields, list(self.takers)]

    @staticmethod
    def from_json(fields: list[Any]) -> Entry:
        phase, module, tensor, dtype, shape, kept, role, call, caller, takers = fields
        return _made(phase, module, tensor, dtype, tuple(shape), kept, role, call, caller, tuple(takers))


@lru_cache(maxsize=2**16)  # steps record the same tensors, and the host's time is the run's
def _described(entry: Entry, name: str, dtype: torch.dtype, shape: torch.Size, kept: int) -> Entry:
    return replace(entry, tensor=name, dtype=str(dtype).removeprefix("torch."), shape=tuple(shape), kept=kept)


_made = lru_cache(maxsize=2**18)(Entry)  # layouts of one run, and of two, have most entries in common


@dataclass(frozen=True)
class Element:
    """The first element that differs: its index, and value and bits in both runs."""

    index: tuple[int, ...]
    a: str
    b: str


def first_difference(entry: Entry, a: bytes, b: bytes) -> Element | None:
    """None where all elements that both runs kept are equal."""
    size = entry.itemsize
    for place in range(min(len(a), len(b)) // size):
        one, other = a[place * size : (place + 1) * size], b[place * size : (place + 1) * size]
        if one != other:
            return Element(tuple(map(int, np.unravel_index(place, entry.shape))), shown(one, entry.dtype), shown(other, entry.dtype))
    return None


def shown(data: bytes, dtype: str) -> str:
    """The value, and its bits: two numbers may look alike, and NaNs do."""
    return f"{_value(data, dtype)!r} (0x{data[::-1].hex()})"


def _value(data: bytes, dtype: str) -> Any:
    if dtype == "bfloat16":  # the upper half of a float32
        data, dtype = bytes(2) + data, "float32"
    if dtype in np.sctypeDict:
        return np.frombuffer(data, dtype=dtype)[0].item()
    import torch

    if not hasattr(torch, dtype):
        raise ValueError(f"this version of PyTorch has no dtype {dtype!r}")
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))[0].item()
