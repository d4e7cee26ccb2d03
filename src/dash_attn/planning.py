"""Shapes and options become a cached Plan. Every backend plans here, so that all of them walk the same tables."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from .explanation import Explanation
from .generators import generate
from .options import AttentionOptions
from .plan import Plan, lower
from .problem import Problem

DEFAULT_WORKERS = 132  # the SMs of an H100 or H200; the order of `auto` never depends on it


def problem_of(q: torch.Tensor, k: torch.Tensor, options: AttentionOptions, tile_q: int, tile_kv: int) -> Problem:
    """The problem of tensors laid out (batch, length, heads, head dim)."""
    batch, q_len, q_heads, _ = q.shape
    _, kv_len, kv_heads, _ = k.shape
    return Problem(options.mask, q_len, kv_len, tile_q, tile_kv, kv_heads, q_heads // kv_heads, batch, options.head_offset)


@lru_cache(maxsize=64)
def plan_for(problem: Problem, schedule: str = "auto", workers: int = DEFAULT_WORKERS) -> Plan:
    """The lowered schedule. Raises ScheduleError where that schedule does not serve the problem."""
    return lower(generate(schedule, problem, workers))


def explanation_of(plan: Plan, backend: str, options: AttentionOptions, **rest: Any) -> Explanation:
    """What the plan says of a call; the backend adds its own."""
    return Explanation(
        backend=backend,
        schedule=plan.schedule_name,
        accumulation=options.accumulation,
        guarantees=plan.guarantees if options.ordered else (),
        order_hash=plan.order_hash,
        gang=plan.gang,
        workers=plan.workers,
        plan_bytes=plan.tables_bytes,
        **rest,
    )
