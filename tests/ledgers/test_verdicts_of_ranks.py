"""The verdicts of `dash-attn diff` on runs of several ranks: all of them are asked for, and the one that differs is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from small_runs import AGREE, DIFFER, FILE, INCOMPLETE, cut_behind, run, said


def of_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch, size: int, fault: Callable[[int, int, Any], None] | None = None) -> Path:
    """One rank after the other: all have the same weights."""
    for rank in range(size):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(size))
        run(folder, 3, before_step=lambda step, model, _, rank=rank: fault and fault(rank, step, model))  # type: ignore[misc]
    return folder


def corrupt_rank_1(rank: int, step: int, model: Any) -> None:
    if (rank, step) == (1, 1):
        with torch.no_grad():
            model.weight[0, 0] += 1


def test_every_rank_of_a_run_must_have_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, one = (of_ranks(tmp_path / name, monkeypatch, size) for name, size in (("a", 2), ("b", 2), ("one", 1)))
    assert said(a, b)[0] == AGREE
    assert said(a, one)[0] == said(one, a)[0] == AGREE
    (b / "rank-1.ledger").unlink()
    for pair, run_name in (((a, b), "B"), ((one, b), "B"), ((b, b), "A")):
        code, _, printed = said(*pair)
        assert code == INCOMPLETE
        assert f"{run_name} has no file of rank 1 of 2" in printed
        assert said(*pair, "--partial")[0] == INCOMPLETE  # it is not shorter: a part was lost
    assert said(a, b, "--rank", "0")[0] == AGREE  # all that was asked for
    (a / "rank-1.ledger").rename(a / "rank-0.ledger")
    assert "is the file of rank 1, under the name of another" in said(a, one)[2]


def test_every_rank_must_have_the_steps_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        run(tmp_path, 3 - rank, rank=rank)
    code, first, printed = said(tmp_path, tmp_path)
    assert code == INCOMPLETE
    assert "as far as both go, steps 0 to 1. Compared" in first, "on every rank"
    assert "rank 1: A lacks step 2 of its rank 0" in printed


def test_ranks_that_are_numbered_by_hand(tmp_path: Path) -> None:
    """Nobody knows how many there are: what the other run has is asked for."""
    for name, ranks in (("a", 2), ("b", 2), ("c", 1)):
        for rank in range(ranks):
            run(tmp_path / name, rank=rank)
    assert said(tmp_path / "a", tmp_path / "b")[0] == AGREE
    assert "B has no file of rank 1 of 2" in said(tmp_path / "a", tmp_path / "c")[2]
    files = tmp_path / "a" / FILE, tmp_path / "b" / "rank-1.ledger"
    assert said(*files)[0] == AGREE  # named one by one
    cut_behind(files[1], -1)
    assert said(*files)[0] == INCOMPLETE


def test_a_run_that_went_on_with_fewer_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the rank that left had recorded past that is no part of the run: it may not be compared."""
    of_ranks(tmp_path / "b", monkeypatch, 2, lambda rank, step, model: rank and step == 2 and model.weight.data.zero_())
    of_ranks(tmp_path / "a", monkeypatch, 1)
    assert said(tmp_path / "a", tmp_path / "b")[0] == DIFFER
    torch.manual_seed(0)
    model = run(tmp_path / "first two", 2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    run(tmp_path / "b", 1, first=2, model=model)
    cut_behind(tmp_path / "b" / "rank-1.ledger", -1)  # killed, as ranks are that a job goes on without
    assert said(tmp_path / "a", tmp_path / "b")[0] == AGREE


@pytest.mark.parametrize("sizes", [(2, 2), (1, 2), (2, 1)], ids=str)
def test_the_rank_is_named(sizes: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are compared on every rank, also beside a run of one. Control: without the fault, above."""
    faults = [corrupt_rank_1 if size == 2 and size not in sizes[:place] else None for place, size in enumerate(sizes)]
    a, b = (of_ranks(tmp_path / str(place), monkeypatch, size, faults[place]) for place, size in enumerate(sizes))
    code, first, _ = said(a, b)
    assert (code, "first in step 1 on rank 1." in first) == (DIFFER, True)
    assert said(a, b, "--rank", "1")[0] == DIFFER
    assert said(a, b, "--rank", "0")[0] == AGREE
    assert "no rank 5 can be compared" in said(a, b, "--rank", "5")[2]


def test_states_of_an_optimizer_that_ranks_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many a rank has does not mean the same on another number of ranks. On as many it does."""
    for size in (1, 2):
        for rank in range(size):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", str(size))
            torch.manual_seed(0)
            layer = torch.nn.Linear(4, 4)
            own = list(layer.parameters())[rank::size]
            run(tmp_path / str(size), model=(layer, torch.optim.AdamW(own, lr=0.0, weight_decay=0.0)))
    assert said(tmp_path / "1", tmp_path / "2")[0] == AGREE


def test_the_environment_is_that_of_the_rank_which_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = of_ranks(tmp_path / "a", monkeypatch, 2)
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        if rank == 1:
            monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        run(tmp_path / "b", 3, before_step=lambda step, model, _, rank=rank: corrupt_rank_1(rank, step, model))  # type: ignore[misc]
    code, first, printed = said(a, tmp_path / "b")
    assert (code, "on rank 1" in first, "CUBLAS_WORKSPACE_CONFIG" in printed) == (DIFFER, True, True)


def test_a_file_beside_a_folder_that_lost_its_like(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (of_ranks(tmp_path / name, monkeypatch, 2) for name in "ab")
    (b / "rank-1.ledger").unlink()
    assert "no rank is in both runs: A has [1], B has [0]" in said(a / "rank-1.ledger", b)[2]
    (a / FILE).write_bytes(b"damaged")
    assert said(a, a, "--rank", "1")[0] == AGREE  # all that was asked for
