"""DASH_ATTN_LOG=1 prints a line to stderr for every new kind of call: what ran, and what decides its bits.

The variable is read once, when this module is imported; setting it later has no effect. While it is off, a call
pays for one look at a boolean.
"""

from __future__ import annotations

import os
import sys
import threading

from torch import Tensor

from .backends import load
from .options import AttentionOptions
from .planning import describe_call
from .validate import ScheduleError

VARIABLE = "DASH_ATTN_LOG"
LOG_CALLS = os.environ.get(VARIABLE, "") not in ("", "0")

_lock = threading.Lock()
_seen: set[tuple] = set()


def log_call(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, backend: str) -> None:
    """Print the call unless one with the same shapes, dtype, device and options was printed before."""
    key = (q.shape, k.shape, v.shape, q.dtype, q.device, options)
    with _lock:
        if key in _seen:
            return
        _seen.add(key)
    print(f"dash-attn: {describe_call(q, k, v, options)}: {_decided(q, k, options, backend)}", file=sys.stderr, flush=True)


def _decided(q: Tensor, k: Tensor, options: AttentionOptions, backend: str) -> str:
    where = f"{backend} on {q.device}"
    try:
        plan = load(backend).backward_plan(q, k, options)
    except ScheduleError as error:  # the forward needs no schedule, so it goes on; the backward will raise this
        return f"{where}, no backward: {error}"
    tiles = f"tiles {plan.problem.tile_q} x {plan.problem.tile_kv}"
    return f"{where}, {plan.schedule_name}, {options.accumulation}, {tiles}, order {plan.order_hash}"
