"""Attention on Hopper GPUs (sm_90a): kernels in kernels/, compiled by NVRTC on first use."""

from __future__ import annotations

from .documents import backward, forward
from .identity import explain, order_in_words

__all__ = ["backward", "explain", "forward", "order_in_words"]
