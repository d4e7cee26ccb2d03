"""Shapes and options become a cached Plan. Every backend plans here, so that all of them walk the same tables."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from ..scheduling.plan import ORDER_DIGITS, Plan, lower
from ..scheduling.problem import Problem
from ..simulation.simulate import Machine, simulate
from .explanation import Explanation
from .given_schedule import schedule_for
from .options import AttentionOptions

DEFAULT_WORKERS = 132  # the SMs of an H100 or H200; the order of `auto` never depends on it
MOST_PREDICTED_TASKS = 4_000_000  # simulated in about four seconds
LONGEST_MASK = 60  # characters; documents may be thousands


def problem_of(q: torch.Tensor, k: torch.Tensor, options: AttentionOptions, tile_q: int, tile_kv: int) -> Problem:
    """The problem of tensors laid out (batch, length, heads, head dim)."""
    batch, q_len, q_heads, _ = q.shape
    _, kv_len, kv_heads, _ = k.shape
    return Problem(options.mask, q_len, kv_len, tile_q, tile_kv, kv_heads, q_heads // kv_heads, batch, options.head_offset)


@lru_cache(maxsize=64)
def plan_for(problem: Problem, schedule: str = "auto", workers: int = DEFAULT_WORKERS) -> Plan:
    """The lowered schedule, by name or as given (JSON text). Raises ScheduleError where it does not serve the problem."""
    return lower(schedule_for(problem, schedule, workers))


def explanation_of(plan: Plan, backend: str, tensors: tuple[Tensor, Tensor, Tensor], options: AttentionOptions, **rest: Any) -> Explanation:
    """What the plan says of a call; the backend adds its own."""
    return Explanation(
        call=describe_call(*tensors, options),
        backend=backend,
        schedule=plan.schedule_name,
        accumulation=options.accumulation,
        guarantees=plan.guarantees if options.ordered else (),
        order_hash=plan.order_hash,
        gang=plan.gang,
        workers=plan.workers,
        plan_bytes=plan.tables_bytes,
        parts=plan.problem.parts,
        **rest,
    )


def explanation_of_several(
    plans: list[Plan], backend: str, tensors: tuple[Tensor, Tensor, Tensor], options: AttentionOptions, **rest: Any
) -> Explanation:
    """Of documents, or of heads, that run one by one, each with the order that it has alone. Sizes are those of the longest."""
    longest = max(plans, key=lambda plan: plan.problem.q_len)
    names = dict.fromkeys(plan.schedule_name for plan in plans)
    order = hash_of(*(plan.order_hash for plan in plans))
    return replace(explanation_of(longest, backend, tensors, options, **rest), schedule=" and ".join(names), order_hash=order)


def hash_of(*parts: str) -> str:
    """One hash of what decides the bits together."""
    return sha256(" ".join(parts).encode()).hexdigest()[:ORDER_DIGITS]


def describe_call(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> str:
    """One line: shapes, dtype and mask."""
    mask = str(options.mask)
    if len(mask) > LONGEST_MASK:
        mask = f"{mask[:LONGEST_MASK]}..."
    shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in (("q", q), ("k", k), ("v", v)))
    softcap = f", softcap {options.softcap:g}" if options.softcap else ""
    dropout = f", dropout {options.dropout_p:g}" if options.dropout_p else ""
    alibi = ", ALiBi" if options.alibi else ""
    return f"{shapes}, {str(q.dtype).removeprefix('torch.')}, {mask}{softcap}{dropout}{alibi}"


def plan_in_words(plan: Plan) -> str:
    parts = f", groups of query heads in {plan.problem.parts} parts" if plan.problem.parts > 1 else ""
    return f"{plan.schedule_name}, tiles {plan.problem.tile_q} x {plan.problem.tile_kv}{parts}, order {plan.order_hash}"


def predict(plan: Plan, options: AttentionOptions, machine: Machine | None, name: str) -> dict[str, Any]:
    """The two fields of an Explanation about time, for the machine called `name`; None means nobody measured its constants."""
    if machine is None:
        return {"prediction_note": f"nobody has measured the constants of {name} for this head dim"}
    if not options.ordered or options.softcap:
        return {"prediction_note": "the constants were fitted to ordered runs without softcap"}
    tasks = plan.problem.tasks
    if tasks > MOST_PREDICTED_TASKS:
        return {"prediction_note": f"{tasks:,} tasks take too long to simulate here (at most {MOST_PREDICTED_TASKS:,})"}
    makespan = _makespan(plan.problem, options.schedule, plan.workers, machine)
    return {"predicted_backward_us": round(makespan, 1), "prediction_note": f"the attention kernel alone, with the constants of {name}"}


@lru_cache(maxsize=256)
def _makespan(problem: Problem, schedule: str, workers: int, machine: Machine) -> float:
    return simulate(schedule_for(problem, schedule, workers), machine).makespan
