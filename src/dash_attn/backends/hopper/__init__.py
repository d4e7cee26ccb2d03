"""Attention on Hopper GPUs (sm_90a): kernels in kernels/, compiled by NVRTC on first use."""

from __future__ import annotations

from .backward import backward, backward_plan
from .forward import forward
from .identity import explain

__all__ = ["backward", "backward_plan", "explain", "forward"]
