"""What decides the bits of attention, for every call of a step: schedule, hash of the order, hashes of the kernels."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from hashlib import sha256
from typing import Any

from ..attention.observers import SharedPart, observers
from ..backends import backend_for, resolve
from ..call.call import Call
from ..call.planning import describe_call

DIGITS = 16
TOLD = ("backend", "schedule", "accumulation", "order_hash", "backward_tiles", "forward_tiles", "kernels")  # what decides bits
Plan = dict[str, Any]


class AttentionCalls:
    """Calls since the last step, each as (module, name of its plan). A kind of call is explained once."""

    def __init__(self, current_module: Callable[[], str | None]) -> None:
        self.plans: dict[str, Plan] = {}
        self._calls: list[tuple[str | None, str]] = []
        self._names: dict[tuple[Any, ...], str] = {}
        self._current_module = current_module
        observers.append(self._observe)

    def take(self) -> tuple[tuple[str | None, str], ...]:
        calls, self._calls = tuple(self._calls), []
        return calls

    def stop(self) -> None:
        if self._observe in observers:
            observers.remove(self._observe)

    def _observe(self, call: Call, shared: SharedPart | None) -> None:
        q, k, v = call.tensors
        key = (q.shape, k.shape, v.shape, q.dtype, q.device, call.options, call.offsets is not None, None if shared is None else shared.key)
        name = self._names.get(key)
        if name is None:
            plan = _plan_of(call) if shared is None else _shared_plan_of(call, shared)
            name = sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:DIGITS]
            self._names[key], self.plans[name] = name, plan
        self._calls.append((self._current_module(), name))


def _plan_of(call: Call) -> Plan:
    plan: Plan = {"call": describe_call(call)}
    options, device = call.options, call.q.device
    if call.offsets is not None:
        asked = {"backend": resolve(options.backend, device), "schedule": options.schedule, "accumulation": options.accumulation}
        return {**plan, **asked, "order_hash": "planned sequence by sequence"}
    try:
        explained = asdict(backend_for(options.backend, device).explain(call, predict_time=False))
    except (ValueError, NotImplementedError) as error:  # the forward has run; what is wrong with the backward, it says itself
        return {**plan, "order_hash": f"not explained: {error}"}
    return {**plan, **{name: explained[name] for name in TOLD}}


def _shared_plan_of(call: Call, shared: SharedPart) -> Plan:
    """The call is that of this rank's rows; schedule and order are those of the whole sequence."""
    return {"call": describe_call(call), "accumulation": call.options.accumulation, **shared.describe()}
