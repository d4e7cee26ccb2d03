"""The choices of one attention call in one frozen value; forward and backward are pure functions of tensors and this."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

from .generators import GENERATORS
from .masks import Mask, check_mask, is_whole

SCHEDULES = ("auto", *GENERATORS)
ACCUMULATIONS = ("ordered", "unordered")
BACKENDS = ("auto", "cpu", "hopper")


@dataclass(frozen=True)
class AttentionOptions:
    """`softcap=0` means none. `head_offset` is the index of the first KV head in the unsharded model."""

    mask: Mask
    scale: float
    softcap: float = 0.0
    schedule: str = "auto"
    accumulation: str = "ordered"
    backend: str = "auto"
    head_offset: int = 0

    def __post_init__(self) -> None:
        check_mask(self.mask)
        if not _is_finite(self.scale) or self.scale == 0:
            raise ValueError(f"softmax_scale must be a finite number other than 0; got {self.scale!r}")
        if not _is_finite(self.softcap) or self.softcap < 0:
            raise ValueError(f"softcap must be a finite number > 0, or 0 for none; got {self.softcap!r}")
        for name, allowed in (("schedule", SCHEDULES), ("accumulation", ACCUMULATIONS), ("backend", BACKENDS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; choose from {', '.join(allowed)}")
        if not is_whole(self.head_offset) or self.head_offset < 0:
            raise ValueError(f"head_offset must be a whole number >= 0; got {self.head_offset!r}")
        object.__setattr__(self, "scale", float(self.scale))
        object.__setattr__(self, "softcap", float(self.softcap))

    @property
    def ordered(self) -> bool:
        return self.accumulation == "ordered"


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
