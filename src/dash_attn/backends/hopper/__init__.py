"""Attention on Hopper GPUs (sm_90a): kernels in kernels/, compiled by NVRTC on first use."""

from __future__ import annotations

from .calls.documents import backward, forward
from .calls.explain import backward_plan, explain, order_in_words

__all__ = ["backward", "backward_plan", "explain", "forward", "order_in_words"]
