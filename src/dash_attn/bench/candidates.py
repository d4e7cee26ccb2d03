"""What is timed: a candidate prepares itself for a shape and then runs forward or backward, again and again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..api import flash_attn_func
from .names import OURS, UNORDERED
from .suites import PASSES, Shape

COMPARED_SCHEDULES = ("ascending", "descending", "spt", "shift", "symmetric_shift", "alternating", "weave")

Tensors = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Runner:
    """A candidate set up for one shape. Results are laid out (batch, length, heads, head dim)."""

    forward: Callable[[], Tensor]
    backward: Callable[[], tuple[Tensor, ...]]
    leaves: tuple[Tensor, ...] = ()  # what the forward's graph ends in

    def call(self, direction: str) -> Callable[[], Any]:
        return self.forward if direction == "forward" else self.backward

    def results(self, direction: str) -> tuple[Tensor, ...]:
        return (self.forward().detach(),) if direction == "forward" else self.backward()


@dataclass(frozen=True)
class Candidate:
    """`deterministic` is what it claims; the claim is checked. Of `passes` the others are another candidate's already."""

    name: str
    prepare: Callable[[Shape, Tensors], Runner]
    deterministic: bool = False
    passes: tuple[str, ...] = PASSES
    identify: Callable[[Shape, Tensors], dict[str, Any]] | None = None  # what decides our bits


def make_tensors(shape: Shape, device: torch.device, seed: int = 0) -> Tensors:
    """q, k, v and dO with standard normal entries."""
    source = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, shape.dtype)

    def random(heads: int) -> Tensor:
        return torch.randn(shape.batch, shape.seqlen, heads, shape.head_dim, generator=source, device=device).to(dtype)

    return random(shape.q_heads), random(shape.kv_heads), random(shape.kv_heads), random(shape.q_heads)


def runner(attention: Callable[..., Tensor], tensors: Tensors, heads_first: bool = False) -> Runner:
    """Forward and backward through autograd; the backward alone, from a graph that is kept."""

    def turned(x: Tensor) -> Tensor:
        return x.transpose(1, 2) if heads_first else x

    q, k, v = (turned(x.detach()).requires_grad_() for x in tensors[:3])
    dout = turned(tensors[3])
    kept = attention(q, k, v)

    def backward() -> tuple[Tensor, ...]:
        return tuple(turned(g) for g in torch.autograd.grad(kept, (q, k, v), dout, retain_graph=True))

    return Runner(lambda: turned(attention(q, k, v)), backward, (q, k, v))


def ours(schedules: bool) -> list[Candidate]:
    """Ordered, unordered and, if asked for, the backward of every schedule we compare."""
    made = [_ours(OURS), _ours(UNORDERED, accumulation="unordered")]
    if schedules:
        made += [_ours(f"{OURS}: {name}", schedule=name) for name in COMPARED_SCHEDULES]
    return made


def _ours(name: str, schedule: str = "auto", accumulation: str = "ordered") -> Candidate:
    def prepare(shape: Shape, tensors: Tensors) -> Runner:
        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = flash_attn_func(q, k, v, causal=shape.causal, schedule=schedule, accumulation=accumulation)
            return out

        return runner(attention, tensors)

    def identify(shape: Shape, tensors: Tensors) -> dict[str, Any]:
        from .identity import identity

        return identity(shape, tensors, schedule, accumulation)

    passes = PASSES if name == OURS else ("backward",)
    return Candidate(name, prepare, accumulation == "ordered", passes, identify)
