"""Attention on Hopper GPUs (sm_90a): kernels in kernels/, compiled by NVRTC on first use."""

from .calls.backward import backward, prepared
from .calls.explain import backward_plan as check_schedule
from .calls.explain import explain, order_in_words
from .calls.forward import forward

HEADS_AT_ONCE = False
EXACT_PARTS = False

__all__ = ["EXACT_PARTS", "HEADS_AT_ONCE", "backward", "check_schedule", "explain", "forward", "order_in_words", "prepared"]
