"""Who wants to hear of calls of attention while they run. With nobody, a call pays for one look at an empty list.

DASH_ATTN_LOG=1 prints a line to stderr for every new kind of call: what ran, and what decides its bits. The variable is read once, when
this module is imported; setting it later has no effect.
"""

import os
import sys
import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from ..backends import backend_for, resolve
from ..call.call import Call
from ..call.explain import call_in_words
from ..call.kv_cache import DECODE_EQUALS_TRAINING, CacheCall
from ..call.planning import describe_call
from ..errors import ScheduleError

VARIABLE = "DASH_ATTN_LOG"
LOG_CALLS = os.environ.get(VARIABLE, "") not in ("", "0")

_lock = threading.Lock()
_seen: set[tuple[Any, ...]] = set()


class SharedPart(NamedTuple):
    """A call whose sequence several ranks share, as this rank sees it."""

    key: Hashable  # equal for calls that are planned alike
    describe: Callable[[], dict[str, Any]]  # what decides its bits, as JSON has it


Observer = Callable[[Call, SharedPart | None], None]


def log_call(call: Call, shared: SharedPart | None = None) -> None:
    """Print the call unless one with the same shapes, dtype, device and options was printed before."""
    if shared is not None:
        return
    (q, k, v), options, offsets = call.tensors, call.options, call.offsets
    sequences = 0 if offsets is None else len(offsets.cu_seqlens_q) - 1
    if _is_new(q.shape, k.shape, v.shape, q.dtype, q.device, options, sequences):
        packed = f" in {sequences} packed sequences" if sequences else ""
        decided = "planned sequence by sequence" if sequences else _order_in_words(call)
        _print(f"{describe_call(call)}{packed}", call, f", {options.accumulation}, {decided}")


def log_cache_call(call: CacheCall) -> None:
    """The same for a call with a cache. How many keys are in it is not looked at."""
    q, k_cache = call.q, call.k_cache
    if _is_new("cache", q.shape, k_cache.shape, q.dtype, q.device, call.options, call.new, call.block_table is None):
        packed = "" if call.offsets is None else ", packed queries"
        appended = f", {call.new} keys appended" if call.new else ""
        _print(f"{call_in_words(call)}{packed}{appended}", call, f", {DECODE_EQUALS_TRAINING}")


def _is_new(*key: Any) -> bool:
    with _lock:
        known = key in _seen
        _seen.add(key)
    return not known


def _print(words: str, call: Call | CacheCall, decided: str) -> None:
    backend = f"{resolve(call.options.backend, call.q.device)} on {call.q.device}"
    print(f"dash-attn: {words}: {backend}{decided}", file=sys.stderr, flush=True)


def _order_in_words(call: Call) -> str:
    try:
        return backend_for(call.options.backend, call.q.device).order_in_words(call)
    except ScheduleError as error:  # the forward needs no schedule, so it goes on; the backward will raise this
        return f"no backward: {error}"


observers: list[Observer] = [log_call] if LOG_CALLS else []


def tell_observers(call: Call, shared: SharedPart | None = None) -> None:
    for observer in tuple(observers):
        observer(call, shared)
