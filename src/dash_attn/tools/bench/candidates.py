"""What is timed: a candidate prepares itself for a shape and then runs forward or backward, again and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attention.explain import explain
from ...attention.functions import flash_attn_func
from ...attention.varlen import flash_attn_varlen_func
from ...backends import ALWAYS_ORDERED
from .shape import PASSES, Shape

# Names that ratios are taken to.
OURS, UNORDERED, EQUAL_HEADS, CUDNN = "dash-attn", "dash-attn unordered", "dash-attn equal heads", "cuDNN"
COMPARED_SCHEDULES = ("ascending", "descending", "spt", "shift", "shift_blocks", "symmetric_shift", "alternating", "weave")


class Tensors(NamedTuple):
    """What goes in, laid out (batch, length, heads, head dim)."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    sinks: Tensor | None = None  # (query heads,)


@dataclass(frozen=True)
class Runner:
    """A candidate set up for one shape. Results are laid out like the inputs."""

    forward: Callable[[], Tensor]
    backward: Callable[[], tuple[Tensor, ...]]
    leaves: tuple[Tensor, ...] = ()  # what the forward's graph ends in
    folded: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] = tuple  # gradients as they are checked; not timed

    def call(self, direction: str) -> Callable[[], Any]:
        return self.forward if direction == "forward" else self.backward

    def results(self, direction: str) -> tuple[Tensor, ...]:
        return (self.forward().detach(),) if direction == "forward" else self.folded(self.backward())


@dataclass(frozen=True)
class Candidate:
    """`deterministic` is what it claims; the claim is checked. A pass that is not in `passes` is already another candidate's."""

    name: str
    prepare: Callable[[Shape, Tensors], Runner]
    deterministic: bool = False
    passes: tuple[str, ...] = PASSES
    identify: Callable[[Shape, Tensors], dict[str, Any]] | None = None  # what decides our bits
    refuses: Callable[[Shape], str | None] = lambda shape: None  # why it cannot compute a shape at all, whatever the machine
    promised: Callable[[Shape, Tensors], Tensor] | None = None  # the output whose bits it promises, computed elsewhere


def is_ours(candidate: str) -> bool:
    """Ours, with or without an order, with equal heads, and each of our schedules."""
    return candidate.startswith(OURS)


def who_runs(shape: Shape, candidates: Sequence[Candidate]) -> dict[str, Any]:
    """Which candidates can compute a case at all, and why the others cannot."""
    refusals = {candidate.name: candidate.refuses(shape) for candidate in candidates}
    return {
        "case": str(shape),
        "runs": [name for name, reason in refusals.items() if reason is None],
        "cannot": {name: reason for name, reason in refusals.items() if reason is not None},
    }


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def make_tensors(shape: Shape, device: torch.device, seed: int = 0) -> Tensors:
    """Standard normal entries."""
    source = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, shape.dtype)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=source, device=device).to(dtype)

    q = random(shape.batch, shape.q_seqlen, shape.q_heads, shape.head_dim)
    k, v = (random(shape.batch, shape.seqlen, shape.kv_heads, dim) for dim in (shape.head_dim, shape.v_head_dim))
    dout = random(shape.batch, shape.q_seqlen, shape.q_heads, shape.v_head_dim)
    return Tensors(q, k, v, dout, random(shape.q_heads) if shape.sinks else None)


def runner(attention: Callable[..., Tensor], tensors: Tensors, heads_first: bool = False) -> Runner:
    """Forward and backward through autograd; the backward alone, from a graph that is kept.

    `attention` takes q, k, v and, where the shape has them, sinks.
    """

    def turned(x: Tensor) -> Tensor:
        return x.transpose(1, 2) if heads_first and x.ndim == 4 else x

    inputs = (tensors.q, tensors.k, tensors.v, *(() if tensors.sinks is None else (tensors.sinks,)))
    leaves = tuple(turned(x.detach()).requires_grad_() for x in inputs)
    dout = turned(tensors.dout)
    kept = attention(*leaves)

    def backward() -> tuple[Tensor, ...]:
        return tuple(turned(g) for g in torch.autograd.grad(kept, leaves, dout, retain_graph=True))

    return Runner(lambda: turned(attention(*leaves)), backward, leaves)


def packed(attention: Callable[..., Tensor], shape: Shape, device: torch.device) -> Callable[..., Tensor]:
    """A function of rows from one of packed tokens, which gets `cu_seqlens` and the longest length after q, k and v."""
    ends = torch.tensor([0, *accumulate(shape.sequences)], dtype=torch.int32, device=device)
    longest = max(shape.sequences)

    def of_rows(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Any:
        tokens = (x.flatten(0, 1) for x in (q, k, v))
        return attention(*tokens, ends, longest, *rest).unflatten(0, (shape.batch, shape.seqlen))

    return of_rows


def ours(schedules: bool, backend: str = "auto") -> list[Candidate]:
    """Ordered, unordered and, if asked for, the backward of every schedule we compare."""
    unordered = [] if backend in ALWAYS_ORDERED else [_ours(UNORDERED, accumulation="unordered", backend=backend)]
    names = COMPARED_SCHEDULES if schedules else ()
    return [_ours(OURS, backend=backend), *unordered, *(_ours(f"{OURS}: {name}", schedule=name, backend=backend) for name in names)]


def _ours(name: str, **chosen: Any) -> Candidate:
    """chosen: the backend, and what is not as by default."""

    def prepare(shape: Shape, tensors: Tensors) -> Runner:
        rest: dict[str, Any] = {**chosen, **({"softcap": shape.softcap} if shape.softcap else {})}

        def of_rows(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Any:
            return flash_attn_func(q, k, v, mask=shape.argument, sinks=sinks[0] if sinks else None, **rest)

        def of_tokens(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int) -> Any:
            return flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, causal=shape.mask == "causal", **rest)

        return runner(packed(of_tokens, shape, tensors.q.device) if shape.lengths else of_rows, tensors)

    passes = PASSES if name == OURS else ("backward",)
    return Candidate(name, prepare, "accumulation" not in chosen, passes, partial(identity, **chosen))


def identity(shape: Shape, tensors: Tensors, **chosen: Any) -> dict[str, Any]:
    """What decides our bits, for the record: the explanation of a call. Empty off the GPU, and for packed sequences."""
    if tensors.q.device.type != "cuda" or shape.lengths:
        return {}
    options: dict[str, Any] = {"mask": shape.argument, "softcap": shape.softcap, "sinks": tensors.sinks, **chosen}
    return asdict(explain(flash_attn_func, tensors.q, tensors.k, tensors.v, predict_time=False, **options))
