"""Stand-ins of the benchmark's tests: a timer that does not wait, attention with planted faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dash_attn.tools.bench.candidates import Runner, Tensors, runner
from dash_attn.tools.bench.shape import Shape

SMALL = Shape("causal", 300, 2, 4, 2, 32)  # three KV tiles


class Clock:
    now = 0.0


def fake_times(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """A call takes the time it adds to the clock, or else a millisecond."""
    taken = []
    for call in calls:
        begun = Clock.now
        call()
        taken.append(Clock.now - begun or 1.0)
    return taken


def math_attention(shape: Shape, tensors: Tensors) -> Runner:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=True)

    return runner(attention, tensors, heads_first=True)


def spoiled(change: Any) -> Any:
    """The same attention with changed gradients."""

    def prepare(shape: Shape, tensors: Tensors) -> Runner:
        good = math_attention(shape, tensors)
        return Runner(good.forward, lambda: change(*good.backward()), good.leaves)

    return prepare
