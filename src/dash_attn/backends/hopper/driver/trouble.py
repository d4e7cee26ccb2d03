"""A kernel that cannot go on writes why to host memory and traps; here it is read.

Three things can happen: a reduce waits absurdly long for its turn, or the postprocess for the last turn of a dQ tile (the plan is
corrupt); cu_seqlens, which only the device reads, are not valid lengths; or the lengths or pages of a cache are not.
The CUDA context is then lost; this says why.
"""

import atexit
import sys
import threading
from itertools import count
from typing import Any

import torch
from numpy.typing import NDArray

from ....call.offsets import FROM_A_MASK
from ....scheduling.problem import Task
from .parameters import Trouble

MOST_POLLS = 200_000_000  # of a semaphore, each about half a microsecond: minutes, far beyond any real wait
MOST_NAMED = 4096  # calls whose tasks can still be named

# What is wrong with a cache; the sequence and a number of it are filled in.
OF_A_CACHE = {
    Trouble.CacheLength: (
        "cache_seqlens is {1} for sequence {0}: it must be at least 0, and with the new keys at most the slots of a sequence"
    ),
    Trouble.CachePadding: "cache_leftpad is {1} for sequence {0}: it must be between 0 and cache_seqlens",
    Trouble.CacheRow: "cache_batch_idx is {1} for sequence {0}: it must be a row of the cache",
    Trouble.CachePage: "entry {1} of sequence {0} in block_table is not a page of the cache",
    Trouble.CacheShared: "page or row {1} of the cache is appended to by sequence {0} and by another one, or twice",
    Trouble.CachePosition: "first_position is {1} for sequence {0}: it must be at least 0 and at most the first position that is attended",
}

_numbers = count()
_tiles: dict[int, tuple[int, int]] = {}  # call -> query heads and tiles between them, to name a task
_lock = threading.Lock()
_report: NDArray[Any] | None = None  # in host memory that kernels can write to, once some call was prepared


def report_address() -> int:
    """Where kernels report."""
    global _report
    with _lock:  # one report, whoever comes first
        if _report is None:
            _report = torch.zeros(4, dtype=torch.int32, pin_memory=True).numpy()
            atexit.register(_print_at_exit)
        return int(_report.ctypes.data)


def register_call(q_heads: int, head_tiles: int) -> int:
    """A number for a prepared call, by which a report finds its shape."""
    number = next(_numbers)
    _tiles[number] = q_heads, head_tiles
    _tiles.pop(number - MOST_NAMED, None)
    return number


def raise_if_troubled() -> None:
    """Raise if an earlier kernel gave up."""
    if _report is not None and _report[0]:
        raise RuntimeError(_message(*_report.tolist()))


def _message(what: int, call: int, x: int, y: int) -> str:
    if what == Trouble.BadLengths:
        return (
            f"dash-attn: cu_seqlens_{'k' if x else 'q'} is wrong at entry {y} or {y + 1}: it must start at 0, never decrease,"
            f" end at the number of tokens and hold no sequence longer than max_seqlen_{'k' if x else 'q'}. If a model of transformers"
            f" was called: {FROM_A_MASK}"
        )
    if what in OF_A_CACHE:
        return f"dash-attn: {OF_A_CACHE[Trouble(what)].format(x, y)}"
    name = f"dQ tile {x} of a call long ago"
    if call in _tiles:
        q_heads, head_tiles = _tiles[call]
        head, q_tile = divmod(x, head_tiles)
        sequence, head = divmod(head, q_heads)
        name = str(Task(head, q_tile, 0, sequence)).rsplit(".", 1)[0]
    return f"dash-attn: the reduce of {name} with turn {y} waited for the turn before it until it was called a hang; the plan is corrupt"


def _print_at_exit() -> None:
    if _report is not None and _report[0]:
        print(_message(*_report.tolist()), file=sys.stderr)
