"""Shapes and options become a cached Plan. Every backend plans here, so that all of them walk the same tables.

Backends that can keep dK and dV of a chain in memory while it rests have plans on any number of workers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from hashlib import sha256
from typing import Any

from ..masks import PatternPerHead
from ..scheduling.generators import generate
from ..scheduling.order import WORKER_INVARIANT
from ..scheduling.plan import ORDER_DIGITS, Plan, lower
from ..scheduling.problem import Problem
from ..scheduling.ranks.share import in_legs
from ..scheduling.ranks.units import SharedSchedule
from ..scheduling.schedule import Schedule, fit
from ..scheduling.validate import StuckOnWorkers
from ..simulation.simulate import Machine, simulate
from .call import Call
from .explain import Explanation
from .options import is_given, read_given
from .parts import runs_packed, runs_whole

DEFAULT_WORKERS = 132  # the SMs of an H100 or H200; the order of `auto` never depends on it
MOST_PREDICTED_TASKS = 4_000_000  # simulated in about four seconds
LONGEST_MASK = 60  # characters; documents may be thousands


def problem_of(call: Call, tile_q: int, tile_kv: int) -> Problem:
    """The problem of dense tensors."""
    options, (batch, q_len, q_heads, _), (_, kv_len, kv_heads, _) = call.options, call.q.shape, call.k.shape
    return Problem(options.mask, q_len, kv_len, tile_q, tile_kv, kv_heads, q_heads // kv_heads, batch, options.head_offset)


def schedule_for(problem: Problem, schedule: str, workers: int) -> Schedule:
    """By name, or the one given. Raises ScheduleError where it does not serve the problem."""
    return fit(read_given(schedule), problem, workers) if is_given(schedule) else generate(schedule, problem, workers)


@lru_cache(maxsize=64)
def plan_for(problem: Problem, schedule: str = "auto", workers: int = DEFAULT_WORKERS) -> Plan:
    """The lowered schedule, by name or as given (JSON text). Raises ScheduleError where it does not serve the problem."""
    return lower(schedule_for(problem, schedule, workers))


def explanation_of(plans: list[Plan], backend: str, call: Call, **rest: Any) -> Explanation:
    """What the plans say of a call; the backend adds its own. Documents, packed sequences, or heads that run one by one have each the order
    that it has alone; sizes are those of the longest.
    """
    plan, options = max(plans, key=lambda plan: plan.problem.q_len), call.options
    return Explanation(
        call=describe_call(call),
        backend=backend,
        schedule=" and ".join(dict.fromkeys(plan.schedule_name for plan in plans)),
        accumulation=options.accumulation,
        guarantees=plan.guarantees if options.ordered else (),
        order_hash=plan.order_hash if runs_whole(call) else hash_of(*(plan.order_hash for plan in plans)),
        gang=plan.gang,
        workers=plan.workers,
        plan_bytes=plan.tables_bytes,
        parts=plan.problem.parts,
        **rest,
    )


def order_in_words(call: Call, plan_of: Callable[[Call], Plan]) -> str:
    """What the backward of dense tensors walks, for a log."""
    if runs_packed(call.options):
        return "planned document by document"
    if isinstance(call.options.mask, PatternPerHead):
        return "planned head by head"
    plan = plan_of(call)
    parts = f", groups of query heads in {plan.problem.parts} parts" if plan.problem.parts > 1 else ""
    return f"{plan.schedule_name}, tiles {plan.problem.tile_q} x {plan.problem.tile_kv}{parts}, order {plan.order_hash}"


def hash_of(*parts: str) -> str:
    """One hash of what decides the bits together."""
    return sha256(" ".join(parts).encode()).hexdigest()[:ORDER_DIGITS]


def describe_call(call: Call) -> str:
    """One line: shapes, dtype and mask."""
    options, mask = call.options, str(call.options.mask)
    if len(mask) > LONGEST_MASK:
        mask = f"{mask[:LONGEST_MASK]}..."
    shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in zip("qkv", call.tensors, strict=True))
    softcap = f", softcap {options.softcap:g}" if options.softcap else ""
    dropout = f", dropout {options.dropout_p:g}" if options.dropout_p else ""
    alibi = ", ALiBi" if options.alibi else ""
    return f"{shapes}, {str(call.q.dtype).removeprefix('torch.')}, {mask}{softcap}{dropout}{alibi}"


def predict(plan: Plan, call: Call, machine: Machine | None, name: str) -> dict[str, Any]:
    """The two fields of an Explanation about time, for the machine called `name`; None means nobody measured its constants."""
    options = call.options
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


@dataclass(frozen=True, eq=False)
class AnyWorkers:
    """A plan, and what to run where its workers are too few for whole chains."""

    plan: Plan
    proven_on_more: Schedule | None = None  # None: they are enough

    @cached_property
    def legs(self) -> SharedSchedule | None:
        """None: whole chains can run."""
        return None if self.proven_on_more is None else in_legs(self.proven_on_more, self.plan.workers)


@lru_cache(maxsize=64)
def plan_on_any(problem: Problem, schedule: str, workers: int) -> AnyWorkers:
    """One order, whatever the number of workers. Raises ScheduleError where the schedule does not serve the problem."""
    try:
        return AnyWorkers(plan_for(problem, schedule, workers))
    except StuckOnWorkers:
        # Workers for all chains at once, into however many parts groups are dealt: then nobody waits to start.
        made = schedule_for(problem, schedule, problem.batch * problem.heads * problem.group * problem.kv_tiles)
        if not is_given(schedule) and WORKER_INVARIANT not in made.order.guarantees:
            raise  # on more workers it is another order
    plan = lower(made)
    return AnyWorkers(replace(plan, placement=replace(plan.placement, workers=workers)), made)
