"""Parts of groups: the rule that makes them, who is in them, and why they can wait for each other without a hang."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases import NAMES
from dash_attn import Causal, Full, ScheduleError, Window
from dash_attn.scheduling import Placement, Problem, Schedule, generate, lower
from dash_attn.scheduling.engine import Costs, Stuck, run_in_model_time
from dash_attn.scheduling.order import Sum
from dash_attn.scheduling.problem import parts_of
from reference import can_finish, dealt
from strategies import examples, problems, seeds

UNTIMED = Costs(0, 0, 0, 0)
LENGTHS = (1, 57, 58, 512, 513, 585, 586, 1024, 1365, 1366, 2048, 2049, 4096, 4097, 100_000)
PARTS = {  # by the lengths above
    1: (1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1),
    2: (1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2),
    4: (1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 4, 4, 4, 4),
    7: (1, 1, 1, 1, 1, 1, 2, 2, 3, 4, 4, 7, 7, 7, 7),
    8: (1, 1, 1, 1, 2, 2, 2, 2, 3, 4, 4, 8, 8, 8, 8),
    71: (1, 1, 2, 9, 11, 11, 12, 18, 24, 36, 36, 71, 71, 71, 71),
}


@pytest.mark.parametrize("group", PARTS)
def test_the_rule(group: int) -> None:
    """A change here is a change of bits: CHANGELOG.md says so."""
    assert tuple(parts_of(group, length) for length in LENGTHS) == PARTS[group]


@given(st.integers(1, 200), st.integers(1, 100_000))
@examples(500)
def test_a_chain_of_several_query_heads_has_at_most_4096_rows(group: int, q_len: int) -> None:
    """... and no fewer parts would do."""
    parts = parts_of(group, q_len)
    assert 1 <= parts <= group
    assert parts == group or -(-group // parts) * q_len <= 4096
    assert parts == 1 or -(-group // (parts - 1)) * q_len > 4096


def test_nothing_else_decides() -> None:
    """Not the batch, the number of KV heads, a shard's offset, the keys, the mask or the tiles."""
    assert list(inspect.signature(parts_of).parameters) == ["group", "q_len"]
    problem = Problem(Causal(), 1500, 1500, group=8)
    assert problem.parts == 4
    changes: list[dict[str, Any]] = [{"batch": 7}, {"heads": 5}, {"head_offset": 3}, {"kv_len": 9000}, {"mask": Full()}, {"tile_q": 128}]
    assert [replace(problem, **change).parts for change in changes] == [4] * 6
    assert replace(problem, q_len=5000).parts == 8, "the control"


@given(st.integers(1, 100), st.integers(1, 5), st.data())
@examples(200)
def test_query_heads_are_dealt_evenly_and_larger_parts_come_last(group: int, heads: int, data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, group))
    problem = Problem(Causal(), 10, 10, heads=heads, group=group, group_parts=parts)
    members = [list(problem.members(part)) for part in range(problem.all_parts)]
    assert [head for of_part in members for head in of_part] == list(range(heads * group)), "every query head once, in order"
    assert members[:parts] == dealt(group, parts)
    for head in range(heads):
        sizes = [len(of_part) for of_part in members[head * parts : (head + 1) * parts]]
        assert sizes == sorted(sizes)
        assert max(sizes) - min(sizes) <= 1
        assert sum(sizes) == group
    assert problem.most_members == max(map(len, members))


def test_seven_query_heads_in_four_parts() -> None:
    problem = Problem(Causal(), 2048, 2048, heads=2, group=7)
    assert [list(problem.members(part)) for part in range(4)] == [[0], [1, 2], [3, 4], [5, 6]]
    assert [list(problem.members(part)) for part in range(4, 8)] == [[7], [8, 9], [10, 11], [12, 13]]
    assert problem.chains == 2 * 4 * problem.kv_tiles
    assert str(problem.task(0, 5, 3, 2, member=1)) == "h9.q2.kv3"


@pytest.mark.parametrize(("value", "message"), [(-1, ">= 0; got -1"), (4, "3 query heads has at most as many parts"), (1.5, "got 1.5")])
def test_bad_parts(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Problem(Causal(), 10, 10, group=3, group_parts=value)


@pytest.mark.parametrize(("tiles", "adds"), [((64, 128), 4), ((128, 128), 2), ((64, 64), 2), ((128, 64), 2), ((80, 128), 4)])
def test_adds_are_as_large_as_contributions_to_dq(tiles: tuple[int, int], adds: int) -> None:
    problem = Problem(Causal(), 4096, 4096, *tiles, group=2)
    assert problem.adds == adds
    assert replace(problem, group_parts=1).adds == replace(problem, group=1).adds == 0, "a whole group's chain finishes dK and dV"


@pytest.mark.parametrize(
    ("name", "sums"), [("alternating", [[(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]]), ("ascending", [[(0, i) for i in range(5)]])]
)
def test_parts_of_one_kind_share_a_sum(name: str, sums: list[Any]) -> None:
    problem = Problem(Causal(), 4096, 4096, heads=3, group=5, head_offset=1)
    plan = lower(generate(name, problem, 16))
    for head in range(3):
        parts = range(5 * head, 5 * head + 5)
        assert [plan.sum_of(part) for part in parts] == sums[0]
        assert len({(plan.sum_of(part).number, plan.kind_of(part)) for part in parts}) == plan.sums == plan.kinds
    assert plan.parts_of_sums == ([3, 2] if name == "alternating" else [5])


def test_with_odd_parts_kv_heads_take_turns_to_begin_with_each_kind() -> None:
    plan = lower(generate("alternating", Problem(Causal(), 4096, 4096, heads=2, group=3), 16))
    assert [plan.kind_of(part) for part in range(6)] == [0, 1, 0, 1, 0, 1]
    shard = lower(generate("alternating", Problem(Causal(), 4096, 4096, heads=1, group=3, head_offset=1), 16))
    assert [shard.kind_of(part) for part in range(3)] == [1, 0, 1], "as those of the second KV head"
    assert shard.order_hash != plan.order_hash


@pytest.mark.parametrize("name", NAMES)
def test_the_order_hash_names_the_parts(name: str) -> None:
    problem = Problem.from_tiles("full", 8, 8, group=6)
    hashes = [lower(generate(name, replace(problem, group_parts=parts), 16)).order_hash for parts in range(1, 7)]
    assert len(set(hashes)) == 6
    for change in ({"batch": 3}, {"heads": 4}, {"heads": 4, "head_offset": 2}):
        again = [lower(generate(name, replace(problem, group_parts=parts, **change), 16)).order_hash for parts in range(1, 7)]
        assert again == hashes
    groups = [lower(generate(name, replace(problem, group=group, group_parts=3), 16)).order_hash for group in range(3, 8)]
    assert len(set(groups)) == 5, "who is in a part depends on the group"


# Why nothing hangs: a part waits, at the end of its chains, for parts whose chains have earlier tickets.


def late_chains(problem: Problem, placement: Placement) -> list[tuple[int, int, int]]:
    """(sequence, part, kv_tile) of chains that start before the one whose dK and dV they wait for."""
    kinds, number = len(placement.starts), {tuple(ticket): i for i, ticket in enumerate(placement.tickets(problem).tolist())}
    assert len(number) == problem.chains
    late = []
    for sequence, part, kv_tile in number:
        before = part - kinds  # of the same sum: every kinds-th part of a group
        if before >= part // problem.parts * problem.parts and number[sequence, before, kv_tile] > number[sequence, part, kv_tile]:
            late.append((sequence, part, kv_tile))
    return late


@given(problems(60), seeds)
@examples(400)
def test_under_any_placement_a_part_waits_for_earlier_tickets(problem: Problem, seed: int) -> None:
    rng = np.random.default_rng(seed)
    many = replace(
        problem, group=int(rng.integers(1, 10)), group_parts=0, batch=int(rng.integers(1, 4)), head_offset=int(rng.integers(0, 5))
    )
    many = replace(many, group_parts=int(rng.integers(0, many.group + 1)))
    kinds = int(rng.integers(1, 4))
    cuts = np.flatnonzero(rng.random(many.kv_tiles - 1) < 0.3) + 1
    segments = tuple(np.diff([0, *cuts, many.kv_tiles]).tolist())
    starts = tuple(rng.permutation(many.kv_tiles) for _ in range(kinds))
    placement = Placement(int(rng.integers(1, 9)), int(rng.integers(1, 6)), starts, segments, int(rng.integers(0, 6)))
    assert not late_chains(many, placement)


@pytest.mark.parametrize("name", NAMES)
@given(problem=problems(60), workers=st.integers(1, 40), group=st.integers(1, 8), data=st.data())
@examples(100)
def test_under_any_generator_a_part_waits_for_earlier_tickets(
    name: str, problem: Problem, workers: int, group: int, data: st.DataObject
) -> None:
    problem = replace(problem, group=group, group_parts=data.draw(st.integers(0, group)))
    try:
        schedule = generate(name, problem, workers)
    except ScheduleError:
        return
    assert not late_chains(problem, schedule.placement)
    assert len(run_in_model_time(schedule, UNTIMED).reduce_start) == problem.tasks


def test_one_sum_for_both_kinds_would_wait_for_later_tickets() -> None:
    """The control: KV heads of odd number begin with the second kind, whose chains start later. So kinds have sums of their own."""
    problem = Problem(Causal(), 4096, 4096, group=3, head_offset=1)
    schedule = generate("alternating", problem, 4)
    first = {part: i for i, (_, part, _) in reversed([*enumerate(schedule.tickets.tolist())])}
    assert first[0] > first[1]
    assert not late_chains(problem, schedule.placement)


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 33, 132, 500])
@pytest.mark.parametrize("mask", [Causal(), Full(), Window(300, 0), Window(100, -1)], ids=str)
@pytest.mark.parametrize(("group", "q_len"), [(8, 4096), (7, 1500), (71, 300)])
def test_runs_to_its_end_on_any_number_of_workers(group: int, q_len: int, mask: Any, workers: int) -> None:
    problem = Problem(mask, q_len, 1100, 128, 128, heads=2, group=group, batch=2, head_offset=1)
    gang = generate("auto", problem, 132).gang
    for name in ("alternating", "weave", "auto"):
        if name == "auto" and workers < gang:
            continue  # refused, as without parts
        schedule = generate(name, problem, workers)
        assert len(run_in_model_time(schedule, UNTIMED).reduce_start) == problem.tasks
    assert can_finish(schedule, workers)


@pytest.mark.parametrize("group", [2, 3, 7])
def test_gangs_of_parts_run_on_as_many_workers_as_one_gang(group: int) -> None:
    problem = Problem(Full(), 4096, 4096, 128, 128, heads=2, group=group)
    gang = generate("shift_blocks", problem, 132).gang
    assert gang == 16
    for workers in (gang, gang + 1, 3 * gang):
        schedule = generate("shift_blocks", problem, workers)
        assert can_finish(schedule, workers)
        run_in_model_time(schedule, UNTIMED)


class LastPartFirst:
    """The control: parts add their dK and dV in reverse order."""

    @staticmethod
    def of_part(problem: Problem, part: int, kinds: int) -> Sum:
        place = part % problem.parts
        return Sum(place % kinds, (problem.parts - 1 - place) // kinds)

    how_many = Sum.how_many


@pytest.mark.parametrize("name", ["ascending", "alternating"])
def test_adds_in_reverse_order_hang(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chain waits for one that has not started. With a worker for each of them nothing hangs, but there may be fewer."""
    problem = Problem.from_tiles("causal", 4, 4, group=4, group_parts=4)
    assert sorted(LastPartFirst.of_part(problem, part, 1).turn for part in range(4)) == [0, 1, 2, 3]
    on_one, on_many = generate(name, problem, 1), generate(name, problem, problem.chains)
    run_in_model_time(on_one, UNTIMED)
    monkeypatch.setattr("dash_attn.scheduling.engine.Sum", LastPartFirst)
    with pytest.raises(Stuck, match="1 chains are blocked, first h0") as stuck:
        run_in_model_time(on_one, UNTIMED)
    [(worker, task, turn, awaited)] = stuck.value.blocked
    assert (worker, task.head, turn) == (0, 0, 3 if name == "ascending" else 1)
    assert awaited == "the part before, to add dK and dV behind it"
    run_in_model_time(on_many, UNTIMED)


def test_turns_of_adds_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """In model time a piece of a sum is handed on from part to part."""
    problem = Problem.from_tiles("full", 4, 4, group=4, group_parts=4)
    costs = Costs(compute=10, reduce=3, latency=20, overlap=2)
    schedule = generate("ascending", problem, 16)
    run = run_in_model_time(schedule, costs)
    number = {tuple(ticket): i for i, ticket in enumerate(schedule.tickets.tolist())}
    for kv_tile in range(4):
        starts = [run.add_start[number[0, part, kv_tile]] for part in range(4)]
        assert all((later - earlier >= 20).all() for earlier, later in pairwise(starts))
    unordered = run_in_model_time(schedule, costs, ordered=False)
    assert unordered.chain_end.max() < run.chain_end.max(), "the control: nobody waits"


def test_json_keeps_the_parts() -> None:
    schedule = generate("alternating", Problem.from_tiles("causal", 4, 4, group=6, group_parts=4), 3)
    again = Schedule.from_json(schedule.to_json())
    assert again.problem == schedule.problem
    assert again.problem.parts == 4
    assert lower(again).order_hash == lower(schedule).order_hash
    assert again.guarantees == schedule.guarantees


def test_json_of_older_versions_is_of_whole_groups() -> None:
    """They had nothing else, so the bits of a saved schedule stay."""
    problem = Problem(Causal(), 4096, 4096, group=3)
    value = json.loads(generate("alternating", problem, 3).to_json())
    assert value["problem"].pop("group_parts") == 0
    old = Schedule.from_json(json.dumps(value))
    assert old.problem == replace(problem, group_parts=1)
    assert lower(old).order_hash == lower(generate("alternating", replace(problem, group=1), 3)).order_hash
    value["problem"]["group_parts"] = 4
    with pytest.raises(ValueError, match="at most as many parts; got group_parts=4"):
        Schedule.from_json(json.dumps(value))
