"""Attention on Hopper GPUs (sm_90a): kernels in kernels/, compiled by NVRTC on first use."""

from __future__ import annotations

from .backward import backward
from .forward import forward
from .identity import explain

__all__ = ["backward", "explain", "forward"]
