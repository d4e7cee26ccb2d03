"""Lower bounds: known values, and the offsets bound against the plain loop it replaces."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dash_attn import ScheduleError
from dash_attn.scheduling import GENERATORS, Problem, generate
from dash_attn.scheduling.engine import Costs, run_in_model_time
from dash_attn.simulation.simulate import lower_bounds
from reference import dealt
from strategies import costs, examples, problems

PAPER = Costs(compute=10, reduce=3, latency=0, overlap=0)
HOPPER = Costs(compute=10, reduce=3, latency=20, overlap=2)


def test_known_values_without_overlap() -> None:
    bounds = lower_bounds(Problem.from_tiles("causal", 8, 4, heads=2), PAPER, 4)
    assert bounds.work == Fraction(2 * (8 + 6 + 4 + 2) * 13, 4)
    assert bounds.longest_chain == 8 * 13
    assert bounds.most_loaded_q_tile == 10 + 4 * 3
    assert bounds.offsets == (6 + 4) * 13  # two of the five longest (8, 8, 6, 6, 4) share a worker
    assert bounds.best == max(bounds)


def test_known_values_with_overlap_and_latency() -> None:
    bounds = lower_bounds(Problem.from_tiles("full", 4, 4, group=2), HOPPER, 2)
    assert bounds.work == 2 * 16 * 10 / 2 + 3
    assert bounds.longest_chain == 8 * 10 + 3
    assert bounds.most_loaded_q_tile == 10 + 3 * 20 + 3


def test_parts_shorten_the_longest_chain() -> None:
    bounds = [lower_bounds(Problem.from_tiles("full", 4, 4, group=3, group_parts=parts), HOPPER, 2) for parts in (1, 2, 3)]
    assert [bound.longest_chain for bound in bounds] == [12 * 10 + 3, 8 * 10 + 3, 4 * 10 + 3]
    assert [bound.work for bound in bounds] == [3 * 16 * 10 / 2 + 3] * 3


def test_reduces_slower_than_computes_set_the_pace() -> None:
    bounds = lower_bounds(Problem.from_tiles("full", 4, 1), Costs(compute=1, reduce=10, latency=0, overlap=2), 1)
    assert bounds.longest_chain == 4 * 5


def test_nothing_to_do_takes_no_time() -> None:
    assert lower_bounds(Problem.from_tiles(np.zeros((2, 2), dtype=bool), 2, 2), PAPER, 4).best == 0


@given(problems(), st.integers(1, 7))
@examples(100)
def test_packing_equals_the_plain_loop(problem: Problem, workers: int) -> None:
    sizes = [len(part) for part in dealt(problem.group, problem.parts)]
    lengths = sorted(
        (n * size for n in problem.chain_lengths.tolist() if n for size in sizes * problem.batch * problem.heads), reverse=True
    )
    best = 0
    for shared in range(1, len(lengths)):
        longest = lengths[: shared * workers + 1]
        if len(longest) == shared * workers + 1:
            best = max(best, sum(longest[-shared - 1 :]))
    assert lower_bounds(problem, PAPER, workers).offsets == best * 13


@given(problems(), costs, st.sampled_from(sorted(GENERATORS)), st.integers(1, 8))
@examples(200)
def test_no_schedule_beats_any_bound(problem: Problem, model: Costs, name: str, workers: int) -> None:
    try:
        schedule = generate(name, problem, workers)
    except ScheduleError:
        return
    for ordered in (True, False):
        makespan = run_in_model_time(schedule, model, ordered=ordered).chain_end.max()
        bounds = lower_bounds(problem, model, workers)
        if not ordered:
            bounds = bounds._replace(most_loaded_q_tile=Fraction(0))  # without turns dQ tiles are no bottleneck
        assert all(makespan >= bound for bound in bounds), bounds
