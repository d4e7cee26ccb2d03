"""Planning must stay cheap. Targets on a laptop core: plan 0.2 s, simulate 10 s; allowed here: five and three times that."""

from __future__ import annotations

from time import perf_counter

import pytest

from dash_attn.scheduling import GENERATORS, Problem, generate, lower
from dash_attn.simulation import Machine, simulate
from dash_attn.simulation.simulate import lower_bounds

PLAN_TARGET, PLAN_FACTOR = 0.2, 5
SIMULATE_TARGET, SIMULATE_FACTOR = 10.0, 3
PLANNED = [name for name in GENERATORS if name != "arrival"]
FULL_MASKS_ONLY = ("shift", "shift_blocks")
# The simulator runs any order alike: two are always simulated.
SIMULATED = [name if name in ("alternating", "shift_blocks") else pytest.param(name, marks=pytest.mark.exhaustive) for name in PLANNED]


def large_problem(name: str) -> Problem:
    return Problem.from_tiles("full" if name in FULL_MASKS_ONLY else "causal", 256, 128, heads=64)


@pytest.mark.parametrize("name", PLANNED)
def test_plan_within_target(name: str) -> None:
    problem = large_problem(name)
    started = perf_counter()
    lower(generate(name, problem, 132))
    assert perf_counter() - started < PLAN_TARGET * PLAN_FACTOR


@pytest.mark.parametrize("name", SIMULATED)
def test_simulate_within_target(name: str) -> None:
    schedule = generate(name, large_problem(name), 132)
    started = perf_counter()
    timeline = simulate(schedule, Machine(overlap=2, latency=2))
    assert timeline.gap >= 0
    assert perf_counter() - started < SIMULATE_TARGET * SIMULATE_FACTOR


def test_planning_does_not_grow_with_the_heads() -> None:
    """A gang without slack was once proven by running every head."""
    problem = Problem.from_tiles("prefix:20", 256, 128, heads=512, batch=8)
    started = perf_counter()
    lower(generate("symmetric_shift", problem, 132))
    assert perf_counter() - started < PLAN_TARGET * PLAN_FACTOR


def test_bounds_do_not_grow_with_the_square_of_the_chains() -> None:
    problem = Problem.from_tiles("causal", 128, 128, heads=64, batch=64)
    started = perf_counter()
    assert lower_bounds(problem, Machine().costs, workers=1).offsets > 0
    assert perf_counter() - started < 1
