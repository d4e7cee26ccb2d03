"""What a call costs the host: microseconds of warm calls of a tiny shape, ours beside PyTorch's, the GPU left to follow.

Calls take turns in rounds, so that the host's clocks meet all of them alike. PyTorch's kernels are chosen once, around all calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...attention.functions import flash_attn_func
from ...attention.kv_cache import flash_attn_with_kvcache
from ...attention.varlen import flash_attn_varlen_func
from .candidates import CUDNN, OURS, first_line, make_tensors
from .measure import OK, UNAVAILABLE, Step, spread
from .pytorch_peers import FLASH
from .shape import Shape

SHAPE = Shape("causal", 128, 1, 2, 2, 64)
CALLS, ROUNDS = 200, 7
SLOTS = 256  # of a cache
KERNELS = {FLASH: "FLASH_ATTENTION", CUDNN: "CUDNN_ATTENTION"}
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Timed(NamedTuple):
    """A call, and what it runs in."""

    name: str
    make: Callable[[], Step]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def measure_host(device: torch.device, synchronize: Callable[[], None], calls: int = CALLS) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    steps: dict[Timed, Step] = {}
    for one in timed_calls(device):
        row: dict[str, Any] = {"candidate": one.name, "calls": calls, "rounds": ROUNDS, "status": OK}
        rows.append(row)
        try:
            with one.around():
                step = one.make()
                step()
            steps[one] = step
        except Exception as error:
            row |= {"status": UNAVAILABLE, "reason": first_line(error)}
    times: dict[str, list[float]] = {one.name: [] for one in steps}
    for _ in range(ROUNDS + 1):  # the first round warms up
        for one, step in steps.items():
            with one.around():
                times[one.name].append(round_time(step, synchronize, calls))
    for row in rows:
        if row["status"] == OK:
            row["median_us"], row["p20_us"], row["p80_us"] = spread(times[row["candidate"]][1:])
    return rows


def round_time(step: Step, synchronize: Callable[[], None], calls: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Microseconds per call; the GPU catches up before."""
    synchronize()
    start = clock()
    for _ in range(calls):
        step()
    return (clock() - start) / calls * 1e6


def timed_calls(device: torch.device) -> list[Timed]:
    q, k, v, dout, _ = make_tensors(SHAPE, device)
    rows = [x.flatten(0, 1) for x in (q, k, v, dout)]
    ends = torch.tensor([0, SHAPE.seqlen // 2, SHAPE.seqlen], dtype=torch.int32, device=device)
    matrix = torch.arange(SHAPE.seqlen, device=device) % 3 < 2
    matrix = matrix[:, None] & matrix
    found = _passes(OURS, lambda q, k, v: flash_attn_func(q, k, v, causal=True), (q, k, v, dout))
    halves = (ends, ends, SHAPE.seqlen // 2, SHAPE.seqlen // 2)
    found += _passes(f"{OURS}, packed", lambda q, k, v: flash_attn_varlen_func(q, k, v, *halves, causal=True), rows)
    found += _passes(f"{OURS}, boolean tensor", lambda q, k, v: flash_attn_func(q, k, v, mask=matrix), (q, k, v, dout))
    found.append(Timed(f"{OURS}, cache", lambda: _cache_step(q, k), torch.no_grad))
    ours = torch.compile(lambda q, k, v: flash_attn_func(q, k, v, causal=True), fullgraph=True)
    found += _passes(f"{OURS}, compiled", _on_gpu(ours), (q, k, v, dout))
    heads_first = [x.transpose(1, 2).contiguous() for x in (q, k, v, dout)]
    for name, kernel in KERNELS.items():
        found += _passes(name, _sdpa, heads_first, kernel)
    compiled = _on_gpu(torch.compile(_sdpa, fullgraph=True))
    return found + _passes(f"{FLASH}, compiled", compiled, heads_first, KERNELS[FLASH])


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def _on_gpu(attention: Attention) -> Attention:
    """A CPU would compile for minutes to say nothing of a GPU's calls."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not q.is_cuda:
            raise RuntimeError("compiled calls are measured on a GPU")
        return attention(q, k, v)

    return run


def _passes(name: str, attention: Attention, tensors: Any, kernel: str | None = None) -> list[Timed]:
    """A forward without gradients, one with, and a backward."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    *inputs, dout = tensors
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    around = nullcontext if kernel is None else partial(sdpa_kernel, getattr(SDPBackend, kernel))

    def backward() -> Step:
        out = attention(*leaves)
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return [
        Timed(f"{name}, forward without gradients", lambda: lambda: attention(*inputs), around),
        Timed(f"{name}, forward", lambda: lambda: attention(*leaves), around),
        Timed(f"{name}, backward", backward, around),
    ]


def _cache_step(q: Tensor, k: Tensor) -> Step:
    caches = [k.new_zeros(SHAPE.batch, SLOTS, *k.shape[2:]) for _ in range(2)]
    lengths = torch.full((SHAPE.batch,), SLOTS // 2, dtype=torch.int32, device=k.device)
    return lambda: flash_attn_with_kvcache(q[:, :1], *caches, cache_seqlens=lengths, causal=True)
