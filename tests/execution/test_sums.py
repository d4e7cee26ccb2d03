"""The executor on parts of groups: dK and dV are added in the order of the parts, and what breaks that order is named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dash_attn.errors import ExecutionError
from dash_attn.execution.interleaving import Interleaving, TaskTime
from dash_attn.execution.rules import ChainPlace, Contribution, Deadlock, Ending, SumPlace
from dash_attn.execution.run import run_plan
from dash_attn.scheduling import Plan
from dash_attn.scheduling.order import Ints, Sum
from recorder import POLICIES, Recorder, plan_of, run


def plan_of_parts(parts: int = 4, schedule: str = "ascending", workers: int = 3, **rest: int) -> Plan:
    return plan_of("causal", 4, 4, schedule, workers, group=4, group_parts=parts, **rest)


@pytest.mark.parametrize("chosen", POLICIES, ids=str)
@pytest.mark.parametrize("schedule", ["ascending", "alternating", "weave"])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_parts_land_in_order(parts: int, schedule: str, chosen: Interleaving) -> None:
    plan = plan_of_parts(parts, schedule, heads=3, batch=2, head_offset=1)
    recorder = run(plan, chosen)
    assert recorder.in_turn_order
    assert recorder.sums_in_order
    sums = min(parts, plan.kinds)
    assert sorted(recorder.sums) == [SumPlace(n, s, h, kv) for n in range(sums) for s in range(2) for h in range(3) for kv in range(4)]
    for place, landed in recorder.sums.items():
        assert [part for part, _ in landed] == [place.kv_head * parts + part for part in range(place.number, parts, plan.kinds)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from(["full", "causal", "window:1,1", "prefix:2"]),
    st.sampled_from(["auto", "ascending", "spt", "alternating", "weave"]),
    st.integers(1, 40),
    st.integers(1, 7),
    st.data(),
)
def test_parts_land_in_order_in_any_plan(mask: str, schedule: str, workers: int, group: int, data: st.DataObject) -> None:
    parts, offset, seed = data.draw(st.integers(1, group)), data.draw(st.integers(0, 3)), data.draw(st.integers(0, 2**32))
    workers = max(workers, 4) if (mask, schedule) == ("full", "auto") else workers  # the four chains of a head are a gang
    plan = plan_of(mask, 8, 4, schedule, workers, heads=2, group=group, group_parts=parts, head_offset=offset)
    recorder = run(plan, Interleaving(seed, threads=data.draw(st.booleans())))
    assert recorder.in_turn_order
    assert recorder.sums_in_order
    assert sum(map(len, recorder.sums.values())) == plan.problem.chains


def test_unordered_adds_parts_as_they_arrive() -> None:
    """The control: without turns every seed adds in another order."""
    plan = plan_of_parts(workers=16)
    runs = [run(plan, Interleaving(seed), ordered=False) for seed in range(5)]
    assert not any(recorder.sums_in_order for recorder in runs)
    assert len({str(sorted(recorder.sums.items())) for recorder in runs}) == 5
    assert all([first for _, first in landed] == [True, False, False, False] for r in runs for landed in r.sums.values())


class LastPartFirst(Plan):
    """The control: a plan whose parts take their turns in reverse order."""

    def sum_of(self, part: int) -> Sum:
        number, _ = super().sum_of(part)
        return Sum(number, (self.problem.parts - 1 - part % self.problem.parts) // self.kinds)


def in_reverse(plan: Plan) -> Plan:
    return LastPartFirst(**{field.name: getattr(plan, field.name) for field in fields(plan)})


@pytest.mark.parametrize("chosen", POLICIES, ids=str)
def test_turns_in_reverse_order_are_a_deadlock(chosen: Interleaving) -> None:
    plan = in_reverse(plan_of_parts(workers=3))
    said = r"(?s)stuck on 3 workers.*dK and dV of b0\.part0\.kv0 \(turn 3\) waits for turn 0, which an earlier part of its group has"
    with pytest.raises(Deadlock, match=said):
        run(plan, chosen)


def test_turns_in_reverse_order_on_enough_workers_add_in_reverse_order() -> None:
    plan = in_reverse(plan_of_parts(workers=16))
    for chosen in POLICIES:
        assert all([part for part, _ in landed] == [3, 2, 1, 0] for landed in run(plan, chosen).sums.values())


class OneTurn(Plan):
    """Two parts have the same turn."""

    def sum_of(self, part: int) -> Sum:
        return super().sum_of(part)._replace(turn=0)


@pytest.mark.parametrize("chosen", POLICIES, ids=str)
def test_a_turn_taken_twice_names_the_chain(chosen: Interleaving) -> None:
    plan = plan_of_parts(2, workers=8)
    twice = OneTurn(**{field.name: getattr(plan, field.name) for field in fields(plan)})
    with pytest.raises(ExecutionError, match=r"dK and dV of b0\.part[01]\.kv\d has turn 0, but that turn of its sum has already landed"):
        run(twice, chosen)


class Endless(Recorder):
    """One chain keeps its dK and dV."""

    def __init__(self, place: ChainPlace) -> None:
        super().__init__()
        self.place = place

    def _walk(self, ticket: ChainPlace, steps: Ints, members: list[int]) -> Iterator[Contribution | Ending]:
        for step in super()._walk(ticket, steps, members):
            if ticket != self.place or isinstance(step, Contribution):
                yield step


@pytest.mark.parametrize("chosen", POLICIES, ids=str)
def test_a_part_that_never_adds_blocks_the_parts_behind_it(chosen: Interleaving) -> None:
    said = r"dK and dV of b0\.part1\.kv2 \(turn 1\) waits for turn 0, which an earlier part of its group has"
    with pytest.raises(Deadlock, match=said):
        run_plan(plan_of_parts(workers=16), Endless(ChainPlace(0, 0, 2)), True, chosen)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("chosen", POLICIES, ids=str)
def test_a_last_part_that_never_adds_is_noticed(chosen: Interleaving, ordered: bool) -> None:
    with pytest.raises(ExecutionError, match="the plan has 16 chains, but 15 landed their dK and dV"):
        run_plan(plan_of_parts(workers=16), Endless(ChainPlace(0, 3, 2)), ordered, chosen)


def test_a_whole_group_ends_without_waiting() -> None:
    """One part: its dK and dV are stored, once."""
    plan = plan_of_parts(1, workers=1)
    recorder = run(plan)
    assert all(landed == [(0, True)] for landed in recorder.sums.values())
    assert len(recorder.sums) == 4


def test_recorded_times_are_of_tasks_alone() -> None:
    times: list[TaskTime] = []
    plan = plan_of_parts(workers=4)
    run(plan, Interleaving(threads=True, record=times))
    assert len(times) == plan.problem.tasks
    assert len({entry.task for entry in times}) == plan.problem.tasks


def test_the_order_of_parts_does_not_depend_on_workers() -> None:
    plan = plan_of_parts(3, "alternating", heads=2)
    first = run(plan).sums
    for workers in (1, 2, 5, 40):
        for chosen in POLICIES:
            again = run(replace(plan, placement=replace(plan.placement, workers=workers)), chosen).sums
            assert again == first
