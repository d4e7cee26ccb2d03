"""Orders and placements are those of the golden files, and a golden file sees every change of an order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cases import NAMES
from dash_attn.scheduling import Schedule, generate
from dash_attn.scheduling.order import HeadOrder, Order
from golden_files import FOLDER, HASHES, UPDATE, WORKERS, actual, actual_hashes, recorded, recorded_hashes, served, written_out
from golden_problems import SMALL

HOW = f"orders changed, and with them everybody's bits. On purpose? {UPDATE}=1 refreshes the golden files; CHANGELOG.md says why"
FLIPPED = (
    "full 8x4",
    "full 10x17, group 2",
    "causal 6x3, group 4",
    "window 12x12, group 3, batch 2",
    "causal 4x4, group 5 in 3 parts, head offset 1",
    "documents, not causal",
    "random 9x7",
)
CASES = [(name, case) for name in NAMES for case in FLIPPED if served(name, SMALL[case]) != "refused"]


@pytest.mark.parametrize("name", NAMES)
def test_golden(name: str) -> None:
    found, expected = actual(name), recorded(name)
    assert found.keys() == expected.keys()
    for case in found:
        assert found[case] == expected[case], f"{name} on {case}: {HOW}"


def test_golden_hashes() -> None:
    found, expected = actual_hashes(), recorded_hashes()
    assert found.keys() == expected.keys()
    changed = {what: f"{found[what]}, was {expected[what]}" for what in found if found[what] != expected[what]}
    assert not changed, f"{len(changed)} {HOW}: {dict(list(changed.items())[:5])}"


def test_golden_hashes_are_many() -> None:
    assert sum(found != "refused" for found in recorded_hashes().values()) >= 500


def test_every_golden_file_belongs_to_a_test() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {
        *(f"{name}.json" for name in NAMES),
        HASHES.name,
        "triton_tiles.txt",
        "public_surface.txt",
    }


def test_golden_files_hold_what_is_special() -> None:
    """Groups, classes, several blocks: a list of problems that lost them would go on passing."""
    alternating, auto = recorded("alternating"), recorded("auto")
    assert auto["full 10x17, group 2"]["order"] == "shift_blocks"
    assert auto["full 10x17, group 2"]["segments"] == "5 4 4 4"
    assert alternating["window 12x12, group 3, batch 2"]["segments"] == "6 6", "classes"
    assert alternating["causal 9x9, group 4"]["segments"] == "9", "no classes"
    assert auto["causal 4x4, group 5 in 3 parts, head offset 1"]["parts"] == "1 2 2"
    assert auto["full 10x17, group 2 in 2 parts"]["order"] == "shift_blocks"
    assert [kind["last_member_first"] for kind in alternating["causal 6x3, group 4"]["kinds"]] == [False, True]


def test_nothing_is_refreshed_unasked(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr("golden_files.FOLDER", tmp_path)
    for value in ("", "0", None):
        monkeypatch.delenv(UPDATE, raising=False) if value is None else monkeypatch.setenv(UPDATE, value)
        with pytest.raises(FileNotFoundError, match=f"{UPDATE}=1 writes it"):
            recorded("spt")
    monkeypatch.setenv(UPDATE, "1")
    assert recorded("spt") == actual("spt")


@pytest.mark.parametrize(("name", "case"), CASES)
def test_golden_files_see_every_change_of_an_order(name: str, case: str) -> None:
    schedule = generate(name, SMALL[case], WORKERS)
    expected = recorded(name)[case]
    assert written_out(_with_order(schedule, schedule.order)) == expected, "the control: nothing changed"
    count = 0
    for what, order in _changed_orders(schedule.order):
        found = written_out(_with_order(schedule, order))
        assert found != expected, f"not seen: {what}"
        assert found["order_hash"] != expected["order_hash"], f"not in order_hash: {what}"
        assert found["kinds"] != expected["kinds"], f"not written out: {what}"
        count += 1
    assert count > sum(len(kind.q_tile) for kind in schedule.order.kinds)


def test_golden_files_see_tiles_and_head_offsets() -> None:
    """The rest of what is in order_hash: equal walks and turns over other tiles, or for other heads, are other bits."""
    case = "causal 6x3, group 4"
    problem, expected = SMALL[case], recorded("alternating")[case]
    double = {field: 2 * getattr(problem, field) for field in ("q_len", "kv_len", "tile_q", "tile_kv")}
    for change in (double, {"head_offset": 1}):
        found = written_out(generate("alternating", replace(problem, **change), WORKERS))
        assert found["kinds"] == expected["kinds"]
        assert found["order_hash"] != expected["order_hash"]
        assert (found["tiles"], found["head_offset"]) != (expected["tiles"], expected["head_offset"])


def test_golden_files_see_parts() -> None:
    case = "causal 6x3, group 4"
    problem, expected = SMALL[case], recorded("alternating")[case]
    assert expected["parts"] == "4"
    hashes = {expected["order_hash"]}
    for parts, members in ((2, "2 2"), (3, "1 1 2"), (4, "1 1 1 1")):
        found = written_out(generate("alternating", replace(problem, group_parts=parts), WORKERS))
        assert found["kinds"] == expected["kinds"]
        assert found["parts"] == members
        hashes.add(found["order_hash"])
    assert len(hashes) == 4
    assert written_out(generate("alternating", replace(problem, group_parts=1), WORKERS)) == expected, "the control: what the rule says"


def _with_order(schedule: Schedule, order: Order) -> Schedule:
    """What `written_out` and `lower` ask of a schedule. A changed order is seldom valid, and a Schedule would refuse it."""
    placement = schedule.placement
    starts = [placement.starts[number % len(placement.starts)] for number in range(len(order.kinds))]
    same = {field: getattr(schedule, field) for field in ("problem", "name", "guarantees", "gang")}
    return cast(Schedule, SimpleNamespace(order=order, placement=replace(placement, starts=tuple(starts)), **same))


def _changed_orders(order: Order) -> Iterator[tuple[str, Order]]:
    for number, kind in enumerate(order.kinds):
        for what, changed in _changed_kinds(kind):
            kinds = (*order.kinds[:number], changed, *order.kinds[number + 1 :])
            yield f"kind {number}: {what}", replace(order, kinds=kinds)
    yield "each kind twice", replace(order, kinds=2 * order.kinds)
    if len(order.kinds) > 1:
        yield "one kind less", replace(order, kinds=order.kinds[:-1])


def _changed_kinds(kind: HeadOrder) -> Iterator[tuple[str, HeadOrder]]:
    yield "the other end of the group first", replace(kind, last_member_first=not kind.last_member_first)
    for task in range(len(kind.q_tile) - 1):
        if kind.chain[task] == kind.chain[task + 1]:
            yield f"tasks {task} and {task + 1} of a walk swapped", replace(kind, q_tile=_swapped(kind.q_tile, task, task + 1))
    for earlier, later in zip(*kind.hand_overs, strict=True):
        yield f"turns of tasks {earlier} and {later} swapped", replace(kind, turn=_swapped(kind.turn, earlier, later))


def _swapped(values: Any, a: int, b: int) -> Any:
    swapped = values.copy()
    swapped[[a, b]] = swapped[[b, a]]
    return swapped
