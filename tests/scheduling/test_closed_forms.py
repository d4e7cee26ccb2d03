"""The paper's makespans, exact: n Q tiles, n KV tiles, n workers, m heads, compute c, reduce r."""

from __future__ import annotations

from fractions import Fraction

import pytest

from dash_attn.scheduling import Problem, generate
from dash_attn.simulation import Machine, simulate

COSTS = [("1", "0.3"), ("1", "1"), ("2.5", "0"), ("0.7", "0.45")]
SIZES = range(2, 33)
EVEN_SIZES = range(2, 33, 2)
HEADS = (1, 2, 4)
EVEN_HEADS = (2, 4)


def makespan(name: str, mask: str, tiles: int, heads: int, costs: tuple[str, str]) -> Fraction:
    machine = Machine(float(costs[0]), float(costs[1]))
    timeline = simulate(generate(name, Problem.from_tiles(mask, tiles, tiles, heads=heads), tiles), machine)
    return Fraction(int(timeline.execution.chain_end.max()), machine.ticks_per_unit)


def step(costs: tuple[str, str]) -> Fraction:
    return Fraction(costs[0]) + Fraction(costs[1])


@pytest.mark.parametrize("costs", COSTS, ids=str)
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_ascending(mask: str, costs: tuple[str, str]) -> None:
    for n in SIZES:
        for m in HEADS:
            assert makespan("ascending", mask, n, m, costs) == m * n * step(costs) + (n - 1) * Fraction(costs[1])


@pytest.mark.parametrize("costs", COSTS, ids=str)
def test_descending_causal(costs: tuple[str, str]) -> None:
    assert Fraction(costs[1]) <= Fraction(costs[0])
    for n in SIZES:
        for m in EVEN_HEADS:
            assert makespan("descending", "causal", n, m, costs) == m * (n + 1) * step(costs) / 2 + (n - 1) * Fraction(costs[1])


@pytest.mark.parametrize("costs", COSTS, ids=str)
def test_shift_full_is_the_work_bound(costs: tuple[str, str]) -> None:
    for n in SIZES:
        for m in HEADS:
            assert makespan("shift", "full", n, m, costs) == m * n * step(costs)


@pytest.mark.parametrize("costs", COSTS, ids=str)
def test_symmetric_shift_causal_is_the_work_bound(costs: tuple[str, str]) -> None:
    for n in EVEN_SIZES:
        for m in EVEN_HEADS:
            assert makespan("symmetric_shift", "causal", n, m, costs) == m * (n + 1) * step(costs) / 2


@pytest.mark.parametrize("tiles", range(1, 33, 2))
def test_symmetric_shift_keeps_the_middle_chain_of_an_odd_count(tiles: int) -> None:
    schedule = generate("symmetric_shift", Problem.from_tiles("causal", tiles, tiles, heads=2), tiles)
    timeline = simulate(schedule)
    assert len(timeline.execution.reduce_start) == schedule.problem.tasks == tiles * (tiles + 1)
    assert len(schedule.order.kinds[0].walk(tiles // 2)) == (tiles + 1) // 2
    assert timeline.gap >= 0
