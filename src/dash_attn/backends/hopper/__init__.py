"""Attention on Hopper GPUs (sm_90a): kernels in kernels/, compiled by NVRTC on first use."""

from __future__ import annotations

from .calls.documents import backward, forward
from .calls.explain import explain, order_in_words

__all__ = ["backward", "explain", "forward", "order_in_words"]
