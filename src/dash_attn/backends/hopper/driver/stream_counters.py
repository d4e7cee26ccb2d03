"""One counter per stream, from which the CTAs of a forward take tickets. The kernel that takes the last one leaves it at 0, so
nothing has to be allocated or reset before a launch; kernels of one stream run one after the other and can share it.

A stream is known by its handle: one that is destroyed while a forward of it still runs must not give its handle to another.
(PyTorch's own streams live as long as the process.)
"""

import threading

import numpy as np
import torch
from torch import Tensor

from ...kept import upload

PER_THREAD_STREAM = 2  # the driver's name for a stream that every thread has of its own: not one stream
MOST_STREAMS = 1024  # of a device; more have no counter of their own

_counters: dict[int, Tensor] = {}  # by device
_slots: dict[tuple[int, int], int] = {}  # by device and stream
_lock = threading.Lock()


def prepare_counters(device: int) -> None:
    """All counters of a device at once, while a call is prepared: a launch may come while PyTorch's memory is that of a graph."""
    with _lock:
        if device not in _counters:
            _counters[device] = upload(np.zeros(MOST_STREAMS, dtype=np.int32), torch.device("cuda", device))


def shared_counter(device: int, stream: int) -> int | None:
    """The address of the stream's counter; None where kernels that would share it may run at the same time (graphs, which
    can be replayed on any stream)."""
    if torch.cuda.is_current_stream_capturing() or stream == PER_THREAD_STREAM:
        return None
    slot = _slots.get((device, stream))
    if slot is None:
        with _lock:
            slot = _slots.setdefault((device, stream), len(_slots))
    return _counters[device].data_ptr() + 4 * slot if slot < MOST_STREAMS else None
