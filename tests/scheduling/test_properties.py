"""Every generator on random masks, sizes and workers: valid, free of deadlock, never better than the bound, or refused with a reason."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases import NAMES, ONLY
from dash_attn import ScheduleError
from dash_attn.scheduling import Problem, generate
from dash_attn.scheduling.engine import Costs
from dash_attn.simulation import Machine, simulate
from reference import can_finish
from strategies import costs, examples, problems

REASONS = r"serves (full|causal) masks only|needs \d+ workers at once .*; there are \d+\."


@pytest.mark.parametrize("name", NAMES)
@given(problem=problems(60), workers=st.integers(1, 12), model=costs)
@examples(60)
def test_valid_or_refused(name: str, problem: Problem, workers: int, model: Costs) -> None:
    try:
        schedule = generate(name, problem, workers)
    except ScheduleError as error:
        assert re.search(REASONS, str(error)), error  # noqa: PT017 (a refusal is one of two good outcomes)
        return
    assert can_finish(schedule, workers)
    timeline = simulate(schedule, Machine(model.compute, model.reduce, model.overlap, model.latency))
    assert len(timeline.execution.reduce_start) == problem.tasks
    assert timeline.gap >= 0


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ONLY])
@given(problem=problems(60))
@examples(40)
def test_with_a_worker_for_every_chain_nothing_is_refused(name: str, problem: Problem) -> None:
    assert generate(name, problem, problem.chains).workers == problem.chains


@given(problem=problems(60), workers=st.integers(1, 12), batch=st.integers(1, 4))
@examples(80)
def test_auto_orders_by_the_problem_alone(problem: Problem, workers: int, batch: int) -> None:
    plenty = generate("auto", problem, problem.chains)
    try:
        other = generate("auto", replace(problem, batch=batch), workers)
    except ScheduleError as error:
        assert "workers at once" in str(error)  # noqa: PT017
        return
    assert other.order.same_bits(plenty.order)
