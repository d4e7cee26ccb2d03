"""Where a difference is, step by step and module by module, in runs with a planted fault."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import dash_attn
from dash_attn.errors import LedgerError
from dash_attn.ledgers.aligning import Pair, how_far_apart
from dash_attn.ledgers.comparing import DIRECTIONS, Spread, spread
from dash_attn.ledgers.format import Entry
from dash_attn.ledgers.reading import read_run
from flipped_runs import Model, train


class Kept(NamedTuple):
    """As a step has them."""

    data: bytes

    def kept_of(self, place: int) -> bytes:
        return self.data


@pytest.mark.parametrize(
    ("dtype", "a", "b", "found"),
    [
        ("float32", np.float32([1, -4]).tobytes(), np.float32([1.5, -3]).tobytes(), (1.0, 0.25)),
        ("bfloat16", b"\x80\x3f\x00\x40", b"\x80\x3f\x40\x40", (1.0, 1 / 3)),  # 1 and 2, 1 and 3
        ("int64", np.int64([7, 2]).tobytes(), np.int64([7, 9]).tobytes(), (7.0, 7 / 9)),
        ("complex64", np.complex64([3j]).tobytes(), np.complex64([4]).tobytes(), (5.0, 1.25)),
        ("float32", np.float32([1]).tobytes(), np.float32([1]).tobytes(), None),  # they differ behind what was kept
        ("float32", np.float32([np.inf, 1]).tobytes(), np.float32([np.inf, 2]).tobytes(), None),
        ("float32", np.float32([np.nan]).tobytes(), np.float32([2]).tobytes(), None),
    ],
)
def test_how_far_apart_values_are(dtype: str, a: bytes, b: bytes, found: tuple[float, float] | None) -> None:
    entry = Entry("forward", "m", "output", dtype=dtype, shape=(2,), kept=2)
    assert how_far_apart(Pair(entry, entry, (0, 0)), Kept(a), Kept(b)) == pytest.approx(found)  # type: ignore[arg-type]
    assert how_far_apart(Pair(entry._replace(kept=0), entry, (0, 0)), Kept(b""), Kept(b"")) is None  # type: ignore[arg-type]


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
