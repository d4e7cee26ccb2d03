"""What a new boolean mask costs the host, once: packing it, planning it, and its bits on the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...attention.functions import flash_attn_func
from ...masks import BooleanMask
from .matrices import Matrix

WARM = 3  # runs, of which the fastest counts


def planning_ms(matrix: Matrix, tensors: tuple[Tensor, ...], options: dict[str, Any]) -> dict[str, float]:
    """Milliseconds beyond those of a mask that is known: `mask` is BooleanMask(tensor); `forward` and `backward` the first of each with a
    new pattern; `elements` the same three with a pattern that is known, as long as its plan is kept."""
    *inputs, dout = tensors
    q, k, v = leaves = tuple(x.detach().requires_grad_() for x in inputs)
    lengths = q.shape[1], k.shape[1]
    drawn = torch.from_numpy(replace(matrix, seed=matrix.seed + 1).elements(*lengths)).to(q.device)
    times: dict[str, float] = {}

    def run(mask: BooleanMask) -> tuple[float, float]:
        out, forward = _timed(lambda: flash_attn_func(q, k, v, mask=mask, **options))
        return forward, _timed(lambda: torch.autograd.grad(out, leaves, dout))[1]

    mask, times["mask"] = _timed(lambda: BooleanMask(drawn))
    first = run(mask)
    warm = [min(some) for some in zip(*(run(mask) for _ in range(WARM)), strict=True)]
    times["forward"], times["backward"] = (max(0.0, one - other) for one, other in zip(first, warm, strict=True))
    again, made = _timed(lambda: BooleanMask(drawn))
    times["elements"] = made + max(0.0, sum(run(again)) - sum(warm))
    return {name: round(value, 3) for name, value in times.items()}


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    torch.cuda.synchronize()
    began = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return result, 1e3 * (time.perf_counter() - began)
