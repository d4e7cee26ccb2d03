"""Attention on the CPU: the reference for what a GPU kernel computes, and in which order."""

from typing import Any

from ...call.call import Call
from .explain import explain, order_in_words
from .passes import backward, forward
from .passes import backward_plan as check_schedule

HEADS_AT_ONCE = False
EXACT_PARTS = True

__all__ = ["EXACT_PARTS", "HEADS_AT_ONCE", "backward", "check_schedule", "explain", "forward", "order_in_words", "prepared"]


def prepared(call: Call, *of_backward: Any) -> None:
    """Nothing: what is kept is found again by each call."""
