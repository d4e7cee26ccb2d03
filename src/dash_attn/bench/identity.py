"""What decides our bits, for the record: the order of the plan and the machine code of the kernels."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ..api import explain
from .candidates import Tensors
from .shape import Shape


def identity(shape: Shape, tensors: Tensors, schedule: str, accumulation: str) -> dict[str, Any]:
    """The explanation of a call; empty off the GPU, and for packed sequences, which `explain` does not take."""
    if tensors.q.device.type != "cuda" or shape.lengths:
        return {}
    options: dict[str, Any] = {"schedule": schedule, "accumulation": accumulation, "softcap": shape.softcap}
    return asdict(explain(tensors.q, tensors.k, tensors.v, mask=shape.attended, sinks=tensors.sinks, predict_time=False, **options))
