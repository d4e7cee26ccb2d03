"""A kernel that waits absurdly long for a rank writes the task's name to host memory and traps; here it is read."""

from __future__ import annotations

import atexit
import sys
from functools import cache

import numpy as np
import torch

from ...problem import Task

MOST_POLLS = 200_000_000  # of a semaphore, each about half a microsecond: minutes, far beyond any real wait


@cache
def _report() -> tuple[torch.Tensor, np.ndarray]:
    memory = torch.zeros(4, dtype=torch.int32, pin_memory=True)
    atexit.register(_print_at_exit)
    return memory, memory.numpy()


_shapes: dict[str, int] = {}


def report_address(q_heads: int, q_tiles: int) -> int:
    """Where a kernel reports; remembers the shape, to name the task."""
    _shapes.update(q_heads=q_heads, q_tiles=q_tiles)
    return _report()[0].data_ptr()


def raise_if_hung() -> None:
    """Raise if an earlier kernel gave up. (The CUDA context is lost then; this says why.)"""
    if _report()[1][0]:
        raise RuntimeError(_message())


def _message() -> str:
    _, dq_tile, rank, _ = _report()[1].tolist()
    head, q_tile = divmod(dq_tile, _shapes["q_tiles"])
    sequence, head = divmod(head, _shapes["q_heads"])
    name = str(Task(head, q_tile, 0, sequence)).rsplit(".", 1)[0]
    return f"dash-attn: the reduce of {name} with rank {rank} waited for the rank before it until it was called a hang; the plan is corrupt"


def _print_at_exit() -> None:
    if _report()[1][0]:
        print(_message(), file=sys.stderr)
