"""A counter for each stream, from which the CTAs of a forward take tickets. The kernel that takes the last one leaves it at 0, so
nothing has to be allocated or reset before a launch; kernels of one stream run one after the other and can share it.
"""

from __future__ import annotations

import torch
from torch import Tensor

PER_THREAD_STREAM = 2  # the driver's name for a stream that every thread has of its own: not one stream

_counters: dict[tuple[int, int], Tensor] = {}


def shared_counter(device: int, stream: int) -> int | None:
    """The address of the stream's counter; None where kernels that would share it may run at the same time (graphs, which
    can be replayed on any stream)."""
    counter = _counters.get((device, stream))
    if torch.cuda.is_current_stream_capturing() or stream == PER_THREAD_STREAM:
        return None
    if counter is None:  # set to 0 in the order of this stream
        counter = _counters.setdefault((device, stream), torch.zeros(1, dtype=torch.int32, device=torch.device("cuda", device)))
    return counter.data_ptr()
