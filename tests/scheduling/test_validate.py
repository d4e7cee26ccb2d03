"""Planted faults, each caught and named; the cheap proofs against an exact execution."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dash_attn import ScheduleError
from dash_attn.scheduling import Placement, Problem, Schedule, generate
from dash_attn.scheduling.engine import Costs, run_in_model_time
from dash_attn.scheduling.order import HeadOrder, Order
from reference import can_finish
from strategies import acyclic_order, examples, one_or_two_kinds, problems, seeds

GRID = "step x worker"


def sound() -> Schedule:
    """Causal, 6 x 6 tiles: kv1 walks q1 .. q5 with turn 1."""
    return generate("ascending", Problem.from_tiles("causal", 6, 6), 6)


def with_tasks(schedule: Schedule, tasks: list[tuple[int, int, int]]) -> Schedule:
    """The schedule with other tasks (kv_tile, q_tile, turn), each chain in list order."""
    kind = schedule.order.kinds[0]
    chain, q_tile, turn = np.array(sorted(tasks, key=lambda t: t[0])).T
    order = Order("planted", (HeadOrder.build(chain, q_tile, turn, kind.first_step),))
    return Schedule(schedule.problem, order, schedule.placement)


def tasks_of(schedule: Schedule) -> list[tuple[int, int, int]]:
    kind = schedule.order.kinds[0]
    return list(zip(kind.chain.tolist(), kind.q_tile.tolist(), kind.turn.tolist(), strict=True))


def placed(schedule: Schedule, workers: int, start: list[int] | None = None, segments: tuple[int, ...] | None = None) -> Schedule:
    old = schedule.placement
    starts = old.starts if start is None else (np.array(start),)
    return Schedule(schedule.problem, schedule.order, Placement(workers, old.lanes, starts, segments or old.segments))


def test_the_unharmed_schedule_passes() -> None:
    assert with_tasks(sound(), tasks_of(sound())).order.same_bits(sound().order)


def test_missing_task() -> None:
    tasks = [t for t in tasks_of(sound()) if t[:2] != (1, 3)]
    with pytest.raises(ScheduleError, match=r"h0\.q3\.kv1 is kept by the mask but missing from the walk of kv1") as error:
        with_tasks(sound(), tasks)
    assert GRID in str(error.value)


def test_doubled_task() -> None:
    with pytest.raises(ScheduleError, match=r"h0\.q3\.kv1 occurs twice in its walk") as error:
        with_tasks(sound(), [*tasks_of(sound()), (1, 3, 1)])
    assert GRID in str(error.value)
    assert "-->q3:1" in str(error.value)


@pytest.mark.parametrize("q_tile", [0, -1, 6])
def test_task_outside_the_mask_or_the_problem(q_tile: int) -> None:
    with pytest.raises(ScheduleError, match=rf"h0\.q{q_tile}\.kv1 is not kept by the mask") as error:
        with_tasks(sound(), [*tasks_of(sound()), (1, q_tile, 0)])
    assert f"-->q{q_tile}:0" in str(error.value)


@pytest.mark.parametrize("turn", [-1, 4])
def test_turn_out_of_range(turn: int) -> None:
    tasks = [(kv, q, turn if (kv, q) == (1, 3) else r) for kv, q, r in tasks_of(sound())]
    with pytest.raises(ScheduleError, match=rf"h0\.q3\.kv1 has turn {turn}; its Q tile has turns 0\.\.3") as error:
        with_tasks(sound(), tasks)
    assert f"-->q3:{turn}" in str(error.value)


def test_duplicate_turn() -> None:
    tasks = [(kv, q, 2 if (kv, q) == (1, 3) else r) for kv, q, r in tasks_of(sound())]
    with pytest.raises(ScheduleError, match=r"h0\.q3\.kv2 has turn 2, which h0\.q3\.kv1 also has") as error:
        with_tasks(sound(), tasks)
    assert "-->q3:2" in str(error.value)


def test_faults_name_the_query_head_they_are_in() -> None:
    problem = Problem.from_tiles("causal", 4, 4, heads=2, group=3, head_offset=1)
    good = generate("alternating", problem, 4)
    kind = good.order.kinds[0]  # with this offset: the second KV head, query heads 3 .. 5
    bad = HeadOrder.build(kind.chain, kind.q_tile, np.zeros_like(kind.turn), kind.first_step)
    with pytest.raises(ScheduleError, match=r"^h3\.q"):
        Schedule(problem, Order("planted", (bad, good.order.kinds[1])), good.placement)


@pytest.mark.parametrize("start", [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 4], [1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 0]])
def test_start_order_that_is_no_permutation(start: list[int]) -> None:
    with pytest.raises(ScheduleError, match="start order of kind 0 must name each of the 6 KV tiles once"):
        placed(sound(), 6, start)
    with pytest.raises(ScheduleError, match="start order of kind 0 must name each of the 6 KV tiles once"):
        Schedule.build(sound().problem, sound().order, (start,), 6)


def test_start_orders_and_kinds_must_match() -> None:
    schedule = sound()
    for starts in ((), (np.arange(6), np.arange(6))):
        with pytest.raises(ScheduleError, match="1 kinds of head need as many start orders"):
            Schedule.build(schedule.problem, schedule.order, starts, 6)
    with pytest.raises(ScheduleError, match="0 kinds of head"):
        Schedule(schedule.problem, Order("none", ()), Placement(6, 1, (), (6,)))


@pytest.mark.parametrize("segments", [(5,), (7,), (6, 0), (7, -1), (3, 2)])
def test_bad_segments(segments: tuple[int, ...]) -> None:
    with pytest.raises(ScheduleError, match="segments must be sizes >= 1 that add up to 6 KV tiles"):
        placed(sound(), 6, segments=segments)


def test_no_segments() -> None:
    with pytest.raises(ScheduleError, match="segments must be sizes >= 1"):
        Schedule(sound().problem, sound().order, Placement(6, 1, sound().placement.starts, ()))


@pytest.mark.parametrize("field", ["offsets", "turn", "first_step"])
def test_arrays_that_do_not_fit_together(field: str) -> None:
    schedule = sound()
    arrays = {name: getattr(schedule.order.kinds[0], name) for name in ("offsets", "q_tile", "turn", "first_step")}
    arrays[field] = arrays[field][:-1]
    with pytest.raises(ScheduleError, match="needs one contiguous walk and one first step for each"):
        Schedule(schedule.problem, Order("planted", (HeadOrder(**arrays),)), schedule.placement)


def test_true_cycle_is_refused_whatever_the_workers() -> None:
    problem = Problem.from_tiles("full", 2, 2)
    circle = HeadOrder.build([0, 0, 1, 1], [0, 1, 1, 0], [1, 0, 1, 0], [0, 0])
    for workers in (1, 2, 100):
        with pytest.raises(ScheduleError, match="on any number of workers: its walks and turns wait for each other in a circle") as error:
            Schedule(problem, Order("circle", (circle,)), Placement(workers, 1, (np.arange(2),), (2,)))
        assert "h0.q0.kv0 (turn 1) waits for h0.q0.kv1" in str(error.value)
        assert GRID in str(error.value)
        assert "-->q0:1" in str(error.value)


def test_gang_larger_than_the_workers_names_the_number_needed() -> None:
    schedule = generate("shift", Problem.from_tiles("full", 8, 8), 8)
    with pytest.raises(ScheduleError, match="would deadlock on 7 workers: it needs 8 chains of a head resident together") as error:
        placed(schedule, 7)
    assert "kv7, whose chain has not started" in str(error.value)
    assert GRID in str(error.value)
    assert placed(schedule, 8).gang == 8


def test_auto_on_too_few_workers_names_the_number_needed() -> None:
    problem = Problem.from_tiles("full", 256, 128, heads=2)
    with pytest.raises(ScheduleError, match=r"^auto \(here shift_blocks\) needs 16 workers at once .*; there are 15\."):
        generate("auto", problem, 15)
    assert generate("auto", problem, 16).gang == 16


def test_start_order_alone_can_deadlock() -> None:
    backwards = [5, 4, 3, 2, 1, 0]
    assert placed(sound(), 1).workers == 1
    with pytest.raises(ScheduleError, match="on 2 workers: it needs 6 chains of a head") as error:
        placed(sound(), 2, backwards)
    assert "h0.q4.kv4 (turn 4) waits for h0.q4.kv3, whose chain has not started" in str(error.value)
    assert GRID in str(error.value)
    assert placed(sound(), 6, backwards).gang == 6


def test_a_torn_gang_is_decided_by_running_it() -> None:
    """Two heads of a gang of 4, cut into segments of 2: all 8 half-started chains must be resident."""
    schedule = generate("shift", Problem.from_tiles("full", 4, 4, heads=2), 4)
    with pytest.raises(ScheduleError, match="would deadlock on 5 workers"):
        placed(schedule, 5, segments=(2, 2))
    assert placed(schedule, 8, segments=(2, 2)).gang == 4


def unproven(problem: Problem, order: Order, placement: Placement) -> Schedule:
    schedule = object.__new__(Schedule)
    for name, value in (("problem", problem), ("order", order), ("placement", placement)):
        object.__setattr__(schedule, name, value)
    return schedule


def random_placement(problem: Problem, kinds: int, rng: np.random.Generator) -> Placement:
    starts = tuple(rng.permutation(problem.kv_tiles) for _ in range(kinds))
    cuts = np.flatnonzero(rng.random(problem.kv_tiles - 1) < 0.2) + 1
    segments = tuple(np.diff([0, *cuts, problem.kv_tiles]).tolist())
    return Placement(int(rng.integers(1, 9)), int(rng.integers(1, 3)), starts, segments, int(rng.integers(0, 3)))


@given(problems(), seeds)
@examples(400)
def test_accepts_exactly_what_an_untimed_execution_finishes(problem: Problem, seed: int) -> None:
    rng = np.random.default_rng(seed)
    order = one_or_two_kinds(problem, rng)
    placement = random_placement(problem, len(order.kinds), rng)
    finishes = can_finish(unproven(problem, order, placement), placement.workers)
    if finishes:
        schedule = Schedule(problem, order, placement)
        assert len(run_in_model_time(schedule, Costs(0, 0, 0, 0)).reduce_start) == problem.tasks
    else:
        with pytest.raises(ScheduleError, match="would deadlock"):
            Schedule(problem, order, placement)


@given(problems(), seeds)
@examples(100)
def test_more_workers_never_hurt(problem: Problem, seed: int) -> None:
    rng = np.random.default_rng(seed)
    order = Order("random", (acyclic_order(problem, rng),))
    schedule = unproven(problem, order, random_placement(problem, 1, rng))
    finishes = [can_finish(schedule, workers) for workers in range(1, problem.chains + 1)]
    assert finishes == sorted(finishes)
    assert finishes[-1]


@given(problems(), st.integers(1, 6), seeds)
@examples(60)
def test_gang_times_lanes_is_always_enough_workers(problem: Problem, lanes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    order = Order("random", (acyclic_order(problem, rng),))
    start = rng.permutation(problem.kv_tiles)
    gang = order.kinds[0].gang(start)
    assert Schedule(problem, order, Placement(gang * lanes, lanes, (start,), (problem.kv_tiles,))).gang == gang
