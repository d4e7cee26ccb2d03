"""Attention on any GPU that Triton compiles for (compute capability 8.0 and later): kernels in kernels/, tiles in tiles.json.

Each sum belongs to one program, which adds in a fixed order: nothing is handed over, so no number of SMs can change a bit.
"""

from typing import Any

from ...call.call import Call
from .explain import explain, order_in_words
from .passes import backward, forward
from .support import check_call as check_schedule  # there is none here: whatever is given is refused

HEADS_AT_ONCE = True
EXACT_PARTS = False

__all__ = ["EXACT_PARTS", "HEADS_AT_ONCE", "backward", "check_schedule", "explain", "forward", "order_in_words", "prepared"]


def prepared(call: Call, *of_backward: Any) -> None:
    """Nothing: what is kept is found again by each call."""
