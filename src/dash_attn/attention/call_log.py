"""DASH_ATTN_LOG=1 prints a line to stderr for every new kind of call: what ran, and what decides its bits.

The variable is read once, when this module is imported; setting it later has no effect. While it is off, a call
pays for one look at a boolean.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from ..backends import backend_for, resolve
from ..call.call import Call
from ..call.explain import call_in_words
from ..call.kv_cache import DECODE_EQUALS_TRAINING, CachePlaces, CacheTensors
from ..call.options import AttentionOptions
from ..call.planning import describe_call
from ..errors import ScheduleError

VARIABLE = "DASH_ATTN_LOG"
LOG_CALLS = os.environ.get(VARIABLE, "") not in ("", "0")

_lock = threading.Lock()
_seen: set[tuple[Any, ...]] = set()


def log_call(call: Call) -> None:
    """Print the call unless one with the same shapes, dtype, device and options was printed before."""
    (q, k, v), options, offsets = call.tensors, call.options, call.offsets
    sequences = 0 if offsets is None else len(offsets.cu_seqlens_q) - 1
    key = (q.shape, k.shape, v.shape, q.dtype, q.device, options, sequences)
    with _lock:
        if key in _seen:
            return
        _seen.add(key)
    packed = f" in {sequences} packed sequences" if sequences else ""
    decided = "planned sequence by sequence" if sequences else _order_in_words(call)
    backend = f"{resolve(options.backend, q.device)} on {q.device}, {options.accumulation}"
    print(f"dash-attn: {describe_call(call)}{packed}: {backend}, {decided}", file=sys.stderr, flush=True)


def log_cache_call(tensors: CacheTensors, places: CachePlaces, options: AttentionOptions, packed: bool) -> None:
    """The same for a call with a cache. How many keys are in it is not looked at."""
    q, k_cache = tensors.q, tensors.k_cache
    key = ("cache", q.shape, k_cache.shape, q.dtype, q.device, options, places.new, places.block_table is None)
    with _lock:
        if key in _seen:
            return
        _seen.add(key)
    appended = f", {places.new} keys appended" if places.new else ""
    backend = f"{resolve(options.backend, q.device)} on {q.device}"
    print(
        f"dash-attn: {call_in_words(tensors, places, options)}{', packed queries' if packed else ''}{appended}: {backend},"
        f" {DECODE_EQUALS_TRAINING}",
        file=sys.stderr,
        flush=True,
    )


def _order_in_words(call: Call) -> str:
    try:
        return backend_for(call.options.backend, call.q.device).order_in_words(call)
    except ScheduleError as error:  # the forward needs no schedule, so it goes on; the backward will raise this
        return f"no backward: {error}"
