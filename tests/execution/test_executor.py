"""The executor alone: rules of residence, turn order under every interleaving, and errors for corrupted plans."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dash_attn.errors import ExecutionError
from dash_attn.execution.interleaving import Interleaving, current_interleaving, interleaving
from dash_attn.execution.rules import ChainPlace, Contribution, Deadlock, Ending, chains_in_order
from dash_attn.execution.run import run_plan
from dash_attn.scheduling import Plan, Task
from dash_attn.scheduling.order import Ints, frozen_ints
from recorder import POLICIES, Recorder, plan_of, run


def with_steps(plan: Plan, changed: dict[tuple[int, int], Any]) -> Plan:
    """The plan with the steps of some chains, by (kind, kv_tile), replaced; no schedule with them could be built."""
    chains = [(kind, kv_tile) for kind in range(plan.kinds) for kv_tile in range(plan.problem.kv_tiles)]
    steps = [np.array(changed.get(chain, plan.steps(*chain))).reshape(-1, 3) for chain in chains]
    first = np.cumsum([0] + [len(s) for s in steps])
    runs = [(0, 0, len(s), 0, 0, 1, 0, start) for s, start in zip(steps, first[:-1], strict=True)]
    entries = np.concatenate(steps)
    return replace(plan, runs=frozen_ints(runs), chain_runs=frozen_ints(range(len(chains) + 1)), entries=frozen_ints(entries))


@pytest.mark.parametrize("chosen", POLICIES, ids=str)
@pytest.mark.parametrize(
    ("mask", "schedule"), [("full", "shift"), ("causal", "symmetric_shift"), ("causal", "alternating"), ("window:1,0", "weave")]
)
def test_turns_land_in_order_and_walks_follow_the_plan(mask: str, schedule: str, chosen: Interleaving) -> None:
    plan = plan_of(mask, 12, 6, schedule, workers=8, heads=3, group=2, batch=2)
    recorder = run(plan, chosen)
    assert recorder.in_turn_order
    assert sum(map(len, recorder.landings.values())) == plan.problem.tasks
    for ticket in chains_in_order(plan):
        steps = plan.steps(ticket.part % plan.kinds, ticket.kv_tile)[:, 0].tolist()
        members = [1, 0] if schedule == "alternating" and ticket.part % 2 else [0, 1]
        assert recorder.walks[ticket] == [(q_tile, member) for member in members for q_tile in steps]


@pytest.mark.parametrize("chosen", POLICIES, ids=str)
@pytest.mark.parametrize("workers", [1, 3, 50])
def test_chains_start_in_ticket_order_on_at_most_that_many_workers(workers: int, chosen: Interleaving) -> None:
    plan = plan_of("causal", 8, 4, "spt", workers, heads=4)
    recorder = run(plan, chosen)
    assert recorder.most_resident <= min(workers, plan.problem.chains)
    assert recorder.started == chains_in_order(plan)


def test_random_interleavings_use_many_workers_and_differ() -> None:
    plan = plan_of("causal", 16, 8, heads=2)
    runs = [run(plan, Interleaving(seed), ordered=False) for seed in range(5)]
    assert min(r.most_resident for r in runs) > 4
    assert len({str(sorted(r.landings.items())) for r in runs}) == 5
    assert not any(r.in_turn_order for r in runs)


def test_unordered_stores_first_and_adds_the_rest() -> None:
    for chosen in POLICIES:
        recorder = run(plan_of("full", 8, 4, heads=2), chosen, ordered=False)
        for landed in recorder.landings.values():
            assert [first for _, first in landed] == [True, False, False, False]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from(["full", "causal", "window:1,1", "window:2,0", "documents:3,5", "prefix:2"]),
    st.sampled_from(["auto", "ascending", "descending", "spt", "alternating", "arrival", "weave"]),
    st.sampled_from([(8, 8), (16, 8), (8, 16)]),
    st.integers(8, 40),
    st.integers(1, 3),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_turn_order_holds_for_any_plan(
    mask: str, schedule: str, tiles: tuple[int, int], workers: int, heads: int, seed: int, threads: bool
) -> None:
    if mask.startswith("documents"):
        tiles = (8, 8)
    plan = plan_of(mask, *tiles, schedule, workers, heads=heads)
    recorder = run(plan, Interleaving(seed, threads))
    assert recorder.in_turn_order
    assert sum(map(len, recorder.landings.values())) == plan.problem.tasks


@pytest.mark.parametrize("chosen", POLICIES, ids=str)
def test_too_few_workers_for_a_gang_is_a_deadlock(chosen: Interleaving) -> None:
    sound = plan_of("full", 4, 4, "shift", 4)
    plan = replace(sound, placement=replace(sound.placement, workers=2))
    with pytest.raises(
        Deadlock,
        match=r"(?s)shift is stuck on 2 workers: 2 resident chains wait.*h0\.q2\.kv0 \(turn 2\) waits for turn 0, which h0\.q2\.kv2 has",
    ):
        run(plan, chosen)


@pytest.mark.parametrize("chosen", POLICIES, ids=str)
def test_circular_wait_is_a_deadlock(chosen: Interleaving) -> None:
    plan = plan_of("full", 2, 2, "ascending")
    circle = with_steps(plan, {(0, 0): [(0, 1, 0), (1, 0, 0)], (0, 1): [(1, 1, 0), (0, 0, 0)]})
    with pytest.raises(Deadlock, match=r"(?s)h0\.q0\.kv0 \(turn 1\) waits for turn 0, which h0\.q0\.kv1 has") as error:
        run(circle, chosen)
    assert "h0.q1.kv1 (turn 1) waits for turn 0, which h0.q1.kv0 has" in str(error.value)


@pytest.mark.parametrize("chosen", POLICIES, ids=str)
def test_a_turn_nobody_has_is_a_deadlock(chosen: Interleaving) -> None:
    plan = plan_of("full", 2, 2, "ascending")
    gap = with_steps(plan, {(0, 0): [(1, 0, 0)]})  # kv0 leaves q0 out
    with pytest.raises(Deadlock, match=r"h0\.q0\.kv1 \(turn 1\) waits for turn 0, which no task has"):
        run(gap, chosen)


@pytest.mark.parametrize("chosen", POLICIES, ids=str)
def test_a_turn_taken_twice_names_the_task(chosen: Interleaving) -> None:
    plan = plan_of("full", 2, 3, "ascending")
    twice = with_steps(plan, {(0, 2): [(0, 1, 0), (1, 2, 0)]})
    with pytest.raises(
        ExecutionError, match=r"h0\.q0\.kv[12] has turn 1, (but that turn of its dQ tile has already landed|which h0\.q0\.kv[12] also has)"
    ):
        run(twice, chosen)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("chosen", POLICIES, ids=str)
@pytest.mark.parametrize(
    ("row", "message"),
    [((1, 2, 0), "has turn 2; its dQ tile has 2 turns"), ((1, -1, 0), "has turn -1"), ((7, 0, 0), "outside the 2 Q tiles")],
)
def test_a_wrong_turn_or_q_tile_names_the_task(row: tuple[int, int, int], message: str, chosen: Interleaving, ordered: bool) -> None:
    wrong = with_steps(plan_of("full", 2, 2, "ascending"), {(0, 1): [(0, 1, 0), row]})
    with pytest.raises(ExecutionError, match=rf"h0\.q{row[0]}\.kv1 .*{message}"):
        run(wrong, chosen, ordered)


@pytest.mark.parametrize("chosen", POLICIES, ids=str)
def test_a_missing_last_turn_is_noticed(chosen: Interleaving) -> None:
    short = with_steps(plan_of("full", 2, 2, "ascending"), {(0, 1): [(0, 1, 0)]})
    with pytest.raises(ExecutionError, match=r"dQ tile b0\.h0\.q1 has 2 turns, but 1 landed"):
        run(short, chosen)


class WrongTurn(Recorder):
    """Asks for a turn that does not exist, in one place of the second sequence."""

    def _walk(self, ticket: ChainPlace, steps: Ints, members: list[int]) -> Iterator[Contribution | Ending]:
        for partial in super()._walk(ticket, steps, members):
            wrong = isinstance(partial, Contribution) and ticket == (1, 1, 0) and partial[:2] == (2, 1)
            yield partial._replace(turn=5) if wrong else partial


@pytest.mark.parametrize("chosen", POLICIES, ids=str)
def test_errors_name_the_query_head_and_the_sequence(chosen: Interleaving) -> None:
    plan = plan_of("full", 2, 2, "ascending", heads=2, group=3, batch=2)
    with pytest.raises(ExecutionError, match=r"^b1\.h5\.q1\.kv0 has turn 5; its dQ tile has 2 turns"):
        run_plan(plan, WrongTurn(), True, chosen)


class Failing(Recorder):
    def land(self, task: Task, value: Any, first: bool) -> None:
        if task == Task(0, 3, 1):
            raise ArithmeticError("out of order")
        super().land(task, value, first)


@pytest.mark.parametrize("chosen", POLICIES, ids=str)
def test_an_error_of_the_kernel_ends_every_worker(chosen: Interleaving) -> None:
    before = threading.active_count()
    with pytest.raises(ArithmeticError, match="out of order"):
        run_plan(plan_of("full", 8, 4, heads=2), Failing(), True, chosen)
    assert threading.active_count() == before


def test_interleaving_holds_inside_its_block_only() -> None:
    assert current_interleaving() is None
    with interleaving(1) as outer:
        with suppress(KeyError), interleaving(2, threads=True, workers=5) as inner:
            assert current_interleaving() == inner == Interleaving(2, True, 5)
            raise KeyError
        assert current_interleaving() == outer
    assert current_interleaving() is None


@pytest.mark.parametrize(
    ("choice", "message"), [({"workers": 0}, "workers .*>= 1; got 0"), ({"workers": 2.5}, "workers"), ({"seed": "a"}, "seed")]
)
def test_bad_interleavings(choice: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Interleaving(**choice)
