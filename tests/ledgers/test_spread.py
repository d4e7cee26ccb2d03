"""Where a difference is, step by step and module by module, in runs with a planted fault."""

from __future__ import annotations

from pathlib import Path

import pytest

import dash_attn
from dash_attn.errors import LedgerError
from dash_attn.ledgers.comparing import DIRECTIONS, Spread, spread
from dash_attn.ledgers.reading import read_run
from flipped_runs import Model, train


def differs(found: Spread, direction: str, module: str) -> list[bool]:
    counts = found.differing[DIRECTIONS.index(direction), found.modules.index(module)]
    return [bool(count) for count in counts]


def test_a_flip_spreads_from_its_module(tmp_path: Path) -> None:
    found = spread(train(tmp_path / "a"), train(tmp_path / "b", flip=True))
    assert found.steps == (0, 1, 2, 3)
    assert found.modules == ("", "first", "first.0", "first.1", "second", "second.0", "second.1", "unused")
    assert differs(found, "forward", "second.0") == [False, False, True, True]
    assert differs(found, "forward", "first") == [False, False, False, True]  # reached by the update of step 2
    assert differs(found, "backward", "first") == [False, False, True, True]
    assert differs(found, "update", "first.0") == [False, False, True, True]
    assert differs(found, "forward", "") == [False, False, True, True]
    assert differs(found, "update", "unused") == [False] * 4
    assert found.compared[DIRECTIONS.index("forward"), found.modules.index("unused")].tolist() == [0] * 4  # it never ran


def test_a_module_contains_what_is_inside_of_it(tmp_path: Path) -> None:
    found = spread(train(tmp_path / "a"), train(tmp_path / "b", flip=True))
    place = found.modules.index
    for counts in (found.compared, found.differing):
        inside = counts[:, place("first.0")] + counts[:, place("first.1")]
        assert (counts[:, place("first")] >= inside).all()
        assert (counts[:, 0] >= counts[:, place("first")] + counts[:, place("second")]).all()
    assert (found.differing <= found.compared).all()


def test_equal_runs_differ_nowhere(tmp_path: Path) -> None:
    found = spread(train(tmp_path / "a"), train(tmp_path / "b"))
    assert not found.differing.any()
    assert found.compared.any()


def test_runs_of_different_length_and_detail(tmp_path: Path) -> None:
    found = spread(train(tmp_path / "a", steps=3), train(tmp_path / "b", detail=False, flip=True))
    assert found.steps == (0, 1, 2)
    modules = found.modules.index("second"), found.modules.index("second.0")
    assert not found.compared[DIRECTIONS.index("forward")][list(modules)].any()  # recorded in one alone
    assert differs(found, "backward", "second.0") == [False, False, True]  # by the gradients of its weights


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    a = train(tmp_path / "a", steps=1)
    with pytest.raises(LedgerError, match="no rank 3 can be compared"):
        spread(a, a, rank=3)
    with pytest.raises(LedgerError, match="there is no ledger"):
        spread(a, tmp_path / "nowhere")
    with dash_attn.ledger(tmp_path / "empty") as ledger:
        ledger.watch(Model())
    with pytest.raises(LedgerError, match="no step in common"):
        spread(a, tmp_path / "empty")


def test_counts_are_those_of_every_tensor(tmp_path: Path) -> None:
    """Counted once more, tensor by tensor. All of them are in the model itself."""
    found = spread(train(tmp_path / "a"), train(tmp_path / "b", flip=True))
    a, b = (read_run(tmp_path / name)[0].steps for name in "ab")
    for place, number in enumerate(found.steps):
        sums = [{(*entry.key, at): value for at, (entry, value) in enumerate(zip(run[number].layout.entries, run[number].sums, strict=True))
                 if entry.phase != "rng"} for run in (a, b)]  # fmt: skip
        assert found.compared[:, 0, place].sum() == len(sums[0])
        assert found.differing[:, 0, place].sum() == sum(sums[0][key] != sums[1][key] for key in sums[0])
