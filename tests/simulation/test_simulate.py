"""The simulator against a clocked machine written independently, its accounts, and the figures DESIGN.md claims."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases import SERVED
from dash_attn import ScheduleError
from dash_attn.scheduling import Placement, Problem, Schedule, generate
from dash_attn.scheduling.engine import Costs, run_in_model_time
from dash_attn.scheduling.order import HeadOrder, Order
from dash_attn.simulation import Machine, Timeline, simulate
from dash_attn.simulation.critical_path import critical_path
from reference import Clockwork
from strategies import costs, examples, one_or_two_kinds, problems, seeds

HOPPER = Machine(compute=1, reduce=0.3, overlap=2, latency=2)
ACCEPTANCE = Problem.from_tiles("causal", 256, 128, heads=16)


def random_schedule(problem: Problem, seed: int) -> Schedule | None:
    rng = np.random.default_rng(seed)
    order: Order = one_or_two_kinds(problem, rng)
    starts = tuple(rng.permutation(problem.kv_tiles) for _ in order.kinds)
    try:
        return Schedule(problem, order, Placement(int(rng.integers(2, 9)), int(rng.integers(1, 3)), starts, (problem.kv_tiles,)))
    except ScheduleError:
        return None


def assert_same_times(schedule: Schedule, model: Costs) -> None:
    run, clock = run_in_model_time(schedule, model), Clockwork(schedule, model).run()
    assert run.chain_start.tolist() == clock.chain_start
    assert run.compute_start.tolist() == clock.compute_start
    assert run.reduce_start.tolist() == clock.reduce_start
    assert run.chain_end.tolist() == clock.chain_end


@given(problems(), costs, seeds)
@examples(300)
def test_agrees_with_a_clocked_machine_on_any_order(problem: Problem, model: Costs, seed: int) -> None:
    schedule = random_schedule(problem, seed)
    if schedule is not None:
        assert_same_times(schedule, model)


MODELS = (Costs(3, 1, 0, 0), Costs(3, 1, 0, 1), Costs(3, 1, 6, 2), Costs(2, 5, 7, 3))
# Models take turns, but each meets every generator and every mask.
CLOCKED = [
    pytest.param(*served, model, marks=[] if (i + j) % 2 or served[0] in ("shift", "shift_blocks") else [pytest.mark.exhaustive])
    for i, served in enumerate(SERVED)
    for j, model in enumerate(MODELS)
]


@pytest.mark.parametrize(("name", "mask", "model"), CLOCKED)
def test_agrees_with_a_clocked_machine_on_every_generator(name: str, mask: str, model: Costs) -> None:
    assert_same_times(generate(name, Problem.from_tiles(mask, 10, 8, heads=3, group=2, batch=2), 9), model)


def test_every_model_meets_every_generator_and_every_mask() -> None:
    always = [case.values for case in CLOCKED if not case.marks]
    for place in (0, 1):
        assert {(case[place], case[2]) for case in always} == {(case.values[place], case.values[2]) for case in CLOCKED}


def test_a_waiting_reduce_does_not_hold_the_other_drain() -> None:
    """kv1 waits on q0 for kv3, which has not started; its q1 passes and ends kv0, whose worker takes kv3 long before kv2 ends."""
    kept = np.array([[0, 1, 0, 1], [1, 1, 0, 0], *[[0, 0, 1, 0]] * 6], dtype=bool)
    order = HeadOrder.build([0, 1, 1, *[2] * 6, 3], [1, 0, 1, *range(2, 8), 0], [1, 1, 0, *[0] * 6, 0], [0] * 4)
    placement = Placement(3, 1, (np.arange(4),), (4,))
    schedule = Schedule(Problem.from_tiles(kept, 8, 4), Order("passing", (order,)), placement)
    model = Costs(compute=2, reduce=1, latency=1, overlap=2)
    assert run_in_model_time(schedule, model).chain_start.tolist() == [0, 0, 0, 6]
    assert_same_times(schedule, model)


@given(problems(), costs, seeds)
@examples(200)
def test_accounts_balance_and_the_critical_path_has_no_holes(problem: Problem, model: Costs, seed: int) -> None:
    schedule = random_schedule(problem, seed)
    if schedule is None or not problem.tasks:
        return
    machine = Machine(model.compute, model.reduce, model.overlap, model.latency)
    timeline = simulate(schedule, machine)
    assert timeline.gap >= 0
    assert_accounts_balance(timeline)
    assert_contiguous(timeline)


def assert_accounts_balance(timeline: Timeline) -> None:
    run, workers = timeline.execution, timeline.schedule.workers
    resident = (run.chain_end - run.chain_start).sum() / (workers * run.chain_end.max())
    idle = 1 - resident
    assert min(timeline.stalls) >= 0
    assert timeline.utilization + timeline.stalled + idle == pytest.approx(1)
    assert timeline.stalled == timeline.stalls.total


def assert_contiguous(timeline: Timeline) -> None:
    """Every event of the path begins exactly when what it waited for lets it, from 0 to the makespan."""
    run, model = timeline.execution, timeline.machine.costs
    path = critical_path(timeline)
    starts = {"compute": run.compute_start, "reduce": run.reduce_start, "add": run.add_start.ravel()}
    begins = [int(starts[phase][index]) for (phase, index), _ in path]
    assert path[0][1] == "start"
    lengths = [begins[0]]
    for ((phase, _), _), (_, cause) in pairwise(path):
        reduce_length = max(model.reduce, model.latency) if cause == "turn" else model.reduce
        lengths.append(model.compute if phase == "compute" else reduce_length)
    assert np.cumsum(lengths).tolist() == begins
    assert begins[-1] + model.reduce == run.chain_end.max()
    assert len(timeline.critical_path) == len(path)


@pytest.mark.parametrize("machine", [Machine(1, 0.3), Machine(1, 0.3, 2, 2), Machine(1, 2, 1), Machine(1, 0, 3, 4)], ids=str)
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("missing", [(), (2, 7), (0, 1)], ids=str)  # KV tiles that no Q tile keeps: their chains have adds alone
def test_accounts_balance_with_adds(missing: tuple[int, ...], parts: int, machine: Machine) -> None:
    kept = np.tri(8, dtype=bool) & ~np.isin(np.arange(8), missing)
    timeline = simulate(generate("alternating", Problem.from_tiles(kept, 8, 8, heads=2, group=4, group_parts=parts), 5), machine)
    assert_accounts_balance(timeline)
    assert_contiguous(timeline)
    phases = [hop.phase for hop in timeline.critical_path]
    if machine.reduce:
        assert phases[-1] == ("add" if parts > 1 else "reduce")


def test_adds_of_dk_and_dv_by_hand() -> None:
    """Three parts of one kind, two adds each. Startup 2, compute 1, reduce 5. The second KV tile has no tasks, but still adds."""
    problem = Problem.from_tiles(np.array([[True, False]]), 1, 2, group=3, group_parts=3)
    timeline = simulate(generate("ascending", problem, 6), Machine(1, 5, startup=2))
    run = timeline.execution
    assert timeline.schedule.tickets.tolist() == [[0, part, kv_tile] for kv_tile in (0, 1) for part in (0, 1, 2)]
    assert (run.compute_start.tolist(), run.reduce_start.tolist()) == ([2, 2, 2], [3, 3, 3])
    assert run.add_start.tolist() == [[8, 13], [13, 18], [18, 23], [2, 7], [7, 12], [12, 17]]
    assert timeline.makespan == 28
    assert [(hop.phase, hop.cause) for hop in timeline.critical_path][2:] == [("add", "drain")] * 2 + [("add", "turn")] * 2


def test_causes_on_the_critical_path() -> None:
    staircase = simulate(generate("ascending", Problem.from_tiles("full", 4, 4), 4), Machine(1, 0.3))
    assert {hop.cause for hop in staircase.critical_path} == {"start", "compute", "turn", "buffer"}
    two_heads = simulate(generate("shift", Problem.from_tiles("full", 4, 4, heads=2), 4), Machine(1, 0.3))
    assert "worker" in {hop.cause for hop in two_heads.critical_path}
    slow_drain = simulate(generate("ascending", Problem.from_tiles("full", 6, 1), 1), Machine(1, 3, overlap=1))
    assert "drain" in {hop.cause for hop in slow_drain.critical_path}


def test_stalls_are_blamed_on_their_cause() -> None:
    no_waits = simulate(generate("shift", Problem.from_tiles("full", 8, 8), 8))
    assert no_waits.stalls == (0, 0, 0)
    assert no_waits.utilization == 1
    waits = simulate(generate("ascending", Problem.from_tiles("full", 8, 8), 8))
    assert waits.stalls.order > 0
    full_buffers = simulate(generate("ascending", Problem.from_tiles("full", 8, 1), 1), Machine(1, 5, overlap=2))
    assert full_buffers.stalls.order == 0
    assert full_buffers.stalls.buffer > 0
    assert full_buffers.stalls.drain > 0


def test_a_full_buffer_is_blamed_on_the_turn_that_filled_it() -> None:
    """kv1 holds one tile; its third compute waits from 2 to 7 because the hand-over of q0 keeps its first reduce from 1 to 6."""
    timeline = simulate(generate("ascending", Problem.from_tiles("full", 3, 2), 2), Machine(1, 1, overlap=1, latency=5))
    assert timeline.makespan == 9
    assert timeline.stalls == (5 / 18, 0, 2 / 18)


def test_task_arrays_are_indexed_by_ticket_then_query_head_then_walk() -> None:
    timeline = simulate(generate("descending", Problem.from_tiles("causal", 3, 3, heads=1, group=2, batch=2), 6))
    names = [str(timeline.task(i)) for i in range(len(timeline.execution.reduce_start))]
    assert len(set(names)) == timeline.schedule.problem.tasks == 24
    assert names[:4] == ["h0.q2.kv0", "h0.q1.kv0", "h0.q0.kv0", "h1.q2.kv0"]
    assert names[-2:] == ["b1.h0.q2.kv2", "b1.h1.q2.kv2"]


@pytest.mark.parametrize(("name", "least", "most"), [("alternating", 0.95, 1), ("ascending", 0, 0.65), ("descending", 0, 0.65)])
def test_alternating_survives_a_slow_hand_over(name: str, least: float, most: float) -> None:
    timeline = simulate(generate(name, ACCEPTANCE, 132), HOPPER)
    share = float(timeline.bounds.work) / int(timeline.execution.chain_end.max())
    assert least < share < most


def test_same_ticks_every_time_and_in_every_unit() -> None:
    schedule = generate("weave", Problem.from_tiles("window:5,2", 32, 24, heads=5), 7)
    first, second = simulate(schedule, HOPPER), simulate(schedule, HOPPER)
    assert first.execution.reduce_start.dtype == np.int64
    assert all(np.array_equal(a, b) for a, b in zip(first.execution, second.execution, strict=True))
    ten_times = simulate(schedule, Machine(10, 3, overlap=2, latency=20))
    assert ten_times.makespan == first.makespan * 10
    assert ten_times.gap == first.gap


def test_progress_is_reported_to_the_end() -> None:
    seen: list[tuple[int, int]] = []
    simulate(generate("ascending", Problem.from_tiles("full", 2, 4, heads=100), 4), progress=lambda *at: seen.append(at))
    assert seen[-1] == (400, 400)
    assert seen == sorted(seen)
    assert len(seen) > 1


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, -math.inf, "1", None, True])
@pytest.mark.parametrize("name", ["compute", "reduce", "latency"])
def test_bad_costs(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a finite number >=? ?0"):
        Machine(**{name: value})  # type: ignore[arg-type]


def test_compute_must_take_time() -> None:
    with pytest.raises(ValueError, match="compute must be a finite number > 0"):
        Machine(compute=0)


@pytest.mark.parametrize("value", [-1, 1.5, math.inf, math.nan, True, "2"])
def test_bad_overlap(value: object) -> None:
    with pytest.raises(ValueError, match="overlap must be a whole number >= 0"):
        Machine(overlap=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("machine", [{"compute": 1e-7}, {"compute": 2e-6, "reduce": 6e-7}, {"latency": 1.4e-6}])
def test_costs_too_small_to_resolve(machine: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="resolved to a millionth: choose a unit"):
        Machine(**machine)  # type: ignore[arg-type]


def test_irrational_costs_fit_the_ticks() -> None:
    machine = Machine(math.pi, math.e / 9, 2, math.sqrt(2))
    timeline = simulate(generate("ascending", Problem.from_tiles("causal", 64, 32, heads=4), 16), machine)
    assert timeline.lower_bound <= timeline.makespan < 10 * timeline.lower_bound
    assert machine.ticks_per_unit <= 10**6


@given(st.decimals(min_value=0, max_value=100, places=3), st.decimals(min_value="0.001", max_value=100, places=3))
@examples(50)
def test_decimal_costs_are_exact(reduce: object, compute: object) -> None:
    machine = Machine(float(str(compute)), float(str(reduce)))
    ticks = machine.ticks_per_unit
    assert 1000 % ticks == 0
    assert (machine.costs.compute, machine.costs.reduce) == (int(compute * ticks), int(reduce * ticks))  # type: ignore[operator]
