"""Schedules from JSON: whatever is wrong is a ValueError that names it, and no claim is believed without a proof."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases import SERVED
from dash_attn import ScheduleError
from dash_attn.scheduling import Placement, Problem, Schedule, generate
from dash_attn.scheduling.order import ALL_GUARANTEES, RUN_TO_RUN, HeadOrder, Order
from strategies import examples

Plant = Callable[[Any], Any]
SMALL = generate("ascending", Problem.from_tiles("causal", 3, 3), 3)
GANG = generate("shift_blocks", Problem.from_tiles("full", 8, 6, heads=2), 8)
BLOCKS = generate("weave", Problem.from_tiles(np.array([[True, False], [True, True]]), 2, 2), 2)


def planted(plant: Plant, schedule: Schedule = SMALL) -> str:
    value = json.loads(schedule.to_json())
    plant(value)
    return json.dumps(value)


def kind(value: Any) -> Any:
    return value["order"]["kinds"][0]


WRONG: dict[str, tuple[Plant, str]] = {
    "a made-up guarantee": (lambda v: v["order"].update(guarantees=["made-up"]), "may be run-to-run, batch-inv.*; got 'made-up'"),
    "guarantees with a gap": (lambda v: v["order"].update(guarantees=list(ALL_GUARANTEES[::2])), "guarantees must be one of"),
    "no guarantee": (lambda v: v["order"].update(guarantees=[]), "guarantees must be one of"),
    "guarantees that are no list": (lambda v: v["order"].update(guarantees=RUN_TO_RUN), "order.guarantees must be a list"),
    "a fractional rank": (lambda v: kind(v)["ranks"][0].__setitem__(0, 0.5), r"ranks\[0\] must be a whole number from 0 .*; got 0.5"),
    "a whole number as a float": (lambda v: kind(v)["ranks"][0].__setitem__(0, 0.0), "got 0.0"),
    "a boolean rank": (lambda v: kind(v)["ranks"][0].__setitem__(0, False), "got False"),
    "a negative rank": (lambda v: kind(v)["ranks"][0].__setitem__(0, -1), "got -1"),
    "a huge step": (lambda v: kind(v)["first_step"].__setitem__(0, 2**80), "from 0 to 2147483647; got 1208"),
    "NaN": (lambda v: kind(v)["first_step"].__setitem__(0, float("nan")), "got nan"),
    "a list for a number": (lambda v: v["placement"].update(workers=[3]), r"placement.workers must be .*; got \[3\]"),
    "text for a list": (lambda v: kind(v).update(walks="h0.q0.kv0"), "walks must be a list; got 'h0"),
    "a turn too many": (lambda v: kind(v)["ranks"][0].append(0), "one turn per task"),
    "a first step too few": (lambda v: kind(v)["first_step"].pop(), "one first step"),
    "a task of another KV tile": (lambda v: kind(v)["walks"][1].__setitem__(0, "h0.q0.kv0"), "walk i holds the tasks of KV tile i"),
    "a task of another head": (lambda v: kind(v)["walks"][0].__setitem__(0, "h1.q0.kv0"), "head 0; got h1.q0.kv0"),
    "a task that is none": (lambda v: kind(v)["walks"][0].__setitem__(0, "q0"), "a task is written like"),
    "a zero in front": (lambda v: kind(v)["walks"][0].__setitem__(0, "h0.q0.kv00"), "a task is written like"),
    "a number as a task": (lambda v: kind(v)["walks"][0].__setitem__(0, 7), "walks must be text; got 7"),
    "a word for a boolean": (lambda v: kind(v).update(last_member_first="no"), "must be True or False; got 'no'"),
    "no kinds": (lambda v: v["order"].update(kinds=[]), "0 kinds of head"),
    "kinds that are an object": (lambda v: v["order"].update(kinds={}), "order.kinds must be a list"),
    "a name that is none": (lambda v: v["order"].update(name=[1]), "order.name must be text"),
    "a fractional segment": (lambda v: v["placement"].update(segments=[3.7]), "placement.segments must be .* got 3.7"),
    "a start of its own kind": (lambda v: v["placement"].update(starts=[[0, 1, 1]]), "must name each of the 3 KV tiles once"),
    "more workers than fit": (lambda v: v["placement"].update(workers=10**40), "placement.workers"),
    "a problem beyond memory": (lambda v: v["problem"].update(q_len=2**31 - 1, tile_q=1), "at most 67108864 tiles"),
    "other KV tiles": (lambda v: v["problem"].update(kv_len=2**31 - 1, tile_kv=1), "needs as many walks; got 3"),
    "a batch beyond counting": (lambda v: v["problem"].update(batch=10**30), "problem.batch must be a whole number"),
    "no tile": (lambda v: v["problem"].update(tile_q=0), "tile_q must be a whole number >= 1"),
    "an unknown field": (lambda v: v["problem"].update(sequences=3), "unknown field 'sequences'; it takes mask, q_len"),
    "a missing field": (lambda v: v["placement"].pop("lanes"), "placement lacks lanes; it takes workers"),
    "a missing part": (lambda v: v.pop("order"), "lacks order"),
    "a mask that is a number": (lambda v: v["problem"].update(mask=3), "mask must be an object"),
    "a mask that is unknown": (lambda v: v["problem"].update(mask="diagonal"), "unknown mask 'diagonal'"),
}


@pytest.mark.parametrize(("plant", "said"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(plant: Plant, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Schedule.from_json(planted(plant))


@pytest.mark.parametrize(
    ("tiles", "said"), [(["#.", "#"], "equally long"), (["#x", "##"], "rows of . and #"), ([], "at least one"), ("##", "must be a list")]
)
def test_tile_maps_are_read_strictly(tiles: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Schedule.from_json(planted(lambda v: v["problem"]["mask"].update(tiles=tiles), BLOCKS))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not the JSON of a schedule"),
        (SMALL.to_json()[:-40], "not the JSON of a schedule"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "must be an object; got list"),
        ("3", "must be an object"),
        ("null", "must be an object"),
        (SMALL.to_json().replace('"workers": 3', '"workers": 3, "workers": 4'), "a key occurs twice"),
        (SMALL.to_json().replace('"workers": 3', f'"workers": {"9" * 5000}'), "not the JSON of a schedule"),
        (None, "must be text; got NoneType"),
        (b"{}", "must be text; got bytes"),
    ],
)
def test_what_is_no_json_of_a_schedule(text: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Schedule.from_json(text)


@pytest.mark.parametrize(("name", "mask"), SERVED)
def test_what_a_generator_gives_keeps_its_guarantees(name: str, mask: str) -> None:
    schedule = generate(name, Problem.from_tiles(mask, 16, 8, heads=3), 8)
    assert Schedule.from_json(schedule.to_json()).guarantees == schedule.guarantees
    assert len(schedule.guarantees) == 2 if name == "shift" else 3


def test_claims_are_not_believed() -> None:
    """Two turns swapped: a valid schedule with a generator's name that no generator gives."""
    claims = json.loads(SMALL.to_json())["order"]["guarantees"]
    assert tuple(claims) == ALL_GUARANTEES

    def swap(value: Any) -> None:
        kind(value)["ranks"][0][1], kind(value)["ranks"][1][0] = 1, 0

    changed = Schedule.from_json(planted(swap))
    assert changed.guarantees == changed.order.guarantees == (RUN_TO_RUN,)
    assert Schedule.from_json(planted(lambda v: v["order"].update(name="mine"))).guarantees == (RUN_TO_RUN,)
    assert Schedule.from_json(planted(lambda v: v["order"].update(guarantees=[RUN_TO_RUN]))).guarantees == ALL_GUARANTEES


def test_an_order_made_by_hand_claims_equal_runs_only() -> None:
    assert Order("mine", SMALL.order.kinds).guarantees == (RUN_TO_RUN,)
    with pytest.raises(ValueError, match="guarantees must be one of"):
        Order("mine", SMALL.order.kinds, ("made-up",))


@pytest.mark.parametrize("first_step", [[0.5, 1, 2], [0.0, 1.0, 2.0], [2**31, 0, 0], [False, True, True], ["0", "1", "2"], [[0], [1], [2]]])
def test_arrays_made_by_hand_are_not_rounded(first_step: Any) -> None:
    order = SMALL.order.kinds[0]
    with pytest.raises(ValueError, match=r"expected whole numbers of at most 32 bits|one of 2 dimensions"):
        HeadOrder(order.offsets, order.q_tile, order.turn, first_step)


@pytest.mark.parametrize("segments", [(1.5, 1.5), (2.0, 1.0), (True, True, True)])
def test_segments_made_by_hand_are_not_rounded(segments: Any) -> None:
    with pytest.raises(ValueError, match="expected whole numbers"):
        Placement(3, 1, ((0, 1, 2),), segments)  # type: ignore[arg-type]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in inside:
        yield from places(entry, (*path, key))


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 12),
    st.sampled_from([2**31 - 1, 2**31, 2**63, 10**30, -(2**70), 0.5, 1.0, 1e300, float("nan"), float("inf")]),
    st.sampled_from(
        ["", "full", "causal", "window:99999999999999999999,0", "documents:1", "prefix:999999999999", "h0.q0.kv0", "h9.q9.kv9"]
    ),
    st.sampled_from(["run-to-run", "shift", "weave", "alternating", "symmetric_shift", [], {}, [[]], [0, 1, 2], [0.5], {"tiles": ["#"]}]),
)


@st.composite
def damaged(draw: st.DrawFn, schedule: Schedule) -> str:
    """The JSON of a schedule with some values replaced, removed or doubled, maybe with its text torn."""
    value = json.loads(schedule.to_json())
    for _ in range(draw(st.integers(0, 3))):
        *path, last = draw(st.sampled_from(list(places(value))[1:]))
        parent = value
        for key in path:
            parent = parent[key]
        change = draw(st.sampled_from(["replace", "replace", "remove", "double"]))
        if change == "replace":
            parent[last] = copy.deepcopy(draw(JUNK))
        elif change == "remove":
            del parent[last]
        elif isinstance(parent, list):
            parent.append(copy.deepcopy(parent[last]))
        if not value:
            break
    text = json.dumps(value)
    if draw(st.integers(0, 4)):
        return text
    first, length = draw(st.integers(0, len(text))), draw(st.integers(0, 5))
    return text[:first] + draw(st.text(max_size=2)) + text[first + length :]


@pytest.mark.parametrize("schedule", [SMALL, GANG, BLOCKS], ids=lambda schedule: schedule.name)
@given(data=st.data())
@examples(300)
def test_damaged_json_is_a_value_error_or_a_schedule(schedule: Schedule, data: st.DataObject) -> None:
    text = data.draw(damaged(schedule))
    try:
        found = Schedule.from_json(text)
    except ValueError:
        return
    expected: tuple[str, ...] = (RUN_TO_RUN,)
    try:
        generated = generate(found.name, found.problem, found.workers)
        expected = generated.order.guarantees if generated.order.same_bits(found.order) else expected
    except ValueError:
        pass
    assert found.order.guarantees == expected


def test_a_proof_by_running_has_a_limit() -> None:
    """Too many lanes for the workers, and a batch of millions: this cannot be run, and is refused."""
    with pytest.raises(ScheduleError, match=r"tasks are too many for that .*; use fewer lanes"):
        Schedule.from_json(planted(lambda v: (v["placement"].update(lanes=9), v["problem"].update(batch=10**8)), GANG))
