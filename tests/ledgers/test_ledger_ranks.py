"""Ledgers of two ranks (gloo): DistributedDataParallel, FSDP2, attention that ranks share, and the example on another number of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dash_attn
import ledger_workers
import train_example
from dash_attn import explain
from dash_attn.distributed import context_parallel_attention
from dash_attn.ledgers import compare_runs, read_run
from dash_attn.ledgers.reading import RankLedger
from processes import run_processes

RANKS = 2


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    path = train_example.copy_with("ends after step 4", tmp_path_factory.mktemp("copy"))
    with pytest.raises(KeyboardInterrupt):
        train_example.train(folder / ledger_workers.MOVED, path, checkpoint_every=3)
    found = run_processes(partial(ledger_workers.everything, str(folder)), RANKS)
    (folder / "weights").write_text(" ".join(one[name] for name in ("example", ledger_workers.MOVED) for one in found))
    return folder


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_runs_agree(runs: Path, kind: str) -> None:
    found = compare_runs(runs / f"{kind}-a", runs / f"{kind}-b")
    assert found.agree
    assert (found.ranks, found.steps) == ((0, 1), (0, 1, 2))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_names_are_those_of_the_model(runs: Path, kind: str) -> None:
    """Detail, too: wrappers are left out."""
    for rank in read_run(runs / f"{kind}-a").values():
        modules = {entry.module for entry in rank.steps[1].layout.entries if entry.phase in ("forward", "backward", "gradient")}
        assert {"", "layers.3.attention.qkv", "head"} <= modules
        assert not any("module" in name or "fsdp" in name.lower() for name in modules)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_flipped_bit_on_one_rank(runs: Path, kind: str) -> None:
    first = compare_runs(runs / f"{kind}-a", runs / f"{kind}-weight").first
    assert first is not None
    assert (first.step, first.culprit.direction, first.culprit.module, first.culprit.inputs_agreed) == (
        1,
        "forward",
        "layers.2.mlp.0",
        True,
    )
    assert first.pair.entry.role == "parameter"
    assert first.pair.entry.shape == (32, 16)  # whole, of FSDP too
    if kind == "ddp":  # only its own forward sees it; the other gets its gradients
        assert first.rank == 1


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_another_sum_over_ranks(runs: Path, kind: str) -> None:
    """All modules agree, so the note says what else it may be."""
    found = compare_runs(runs / f"{kind}-a", runs / f"{kind}-reduction")
    assert found.first is not None
    assert (found.first.step, found.first.culprit.direction, found.first.pair.entry.phase) == (1, "backward", "gradient")
    assert found.first.pair.entry.module == "layers.2.mlp.0"
    assert "ranks that differ: 0, 1" in found.notes
    assert any("summed over ranks" in note for note in found.notes)
    assert not any("summed over ranks" in note for note in compare_runs(runs / f"{kind}-a", runs / f"{kind}-weight").notes)


def test_shards_of_weights_are_each_ranks_own(runs: Path) -> None:
    shapes = {rank: _shape_of_weight(ledger) for rank, ledger in read_run(runs / "fsdp-a").items()}
    assert set(shapes.values()) == {(16, 16)}  # half of (32, 16)
    assert _shape_of_weight(read_run(runs / "ddp-a")[0]) == (32, 16)


def _shape_of_weight(ledger: RankLedger) -> tuple[int, ...]:
    entries = ledger.steps[0].layout.entries
    return next(entry.shape for entry in entries if (entry.phase, entry.module, entry.tensor) == ("weight", "layers.2.mlp.0", "weight"))


def _plans(folder: Path) -> list[dict[str, Any]]:
    return [rank.plans[name] for rank in read_run(folder).values() for _, name in rank.steps[0].layout.attention]


def test_attention_that_ranks_share_is_recorded_with_its_plan(runs: Path) -> None:
    plans = _plans(runs / "context-zigzag")
    rows = torch.empty(1, ledger_workers.ROWS // RANKS, 2, 16)
    explained = explain(context_parallel_attention, rows, rows, rows, RANKS, causal=True)
    whole = torch.empty(1, ledger_workers.ROWS, 2, 16)
    assert [(plan["schedule"], plan["order_hash"]) for plan in plans] == [(explained.schedule, explained.order_hash)] * RANKS
    assert explained.order_hash == dash_attn.explain(dash_attn.flash_attn_func, whole, whole, whole, causal=True).order_hash
    assert [(plan["ranks"], plan["rank"]) for plan in plans] == [(2, 0), (2, 1)]
    assert plans[0]["chunks"] == [[128, 256, 128], [0, 1, 0]]  # of four, the middle two are one rank's
    assert compare_runs(runs / "context-zigzag", runs / "context-again").agree


def test_another_sharding_is_a_difference_of_plans(runs: Path) -> None:
    found = compare_runs(runs / "context-zigzag", runs / "context-contiguous")
    assert [name for name, *_ in found.attention] == ["step 0, the model itself: chunks"]


def test_heads_that_ranks_exchange_are_recorded_as_one_call(runs: Path) -> None:
    """Ulysses alone: each rank has whole rows of its heads, and calls attention like one rank."""
    plans = _plans(runs / "context-ulysses")
    assert ["q (1, 512, 1, 16)" in plan["call"] for plan in plans] == [True, True]
    assert plans[0]["order_hash"] != ""


def test_the_example_on_another_number_of_processes(runs: Path, tmp_path: Path) -> None:
    """From the start, and from a checkpoint of one process on."""
    alone = train_example.train(tmp_path / "a", detail_from=6)
    assert (runs / "weights").read_text().split() == [alone] * RANKS * 2
    for name, lenient in (("example", False), (ledger_workers.MOVED, True)):  # the second has no detail
        found = compare_runs(tmp_path / "a", runs / name, partial=lenient)
        assert found.agree, found
        assert found.attention == []
        assert (found.steps, found.ranks) == (tuple(range(9)), (0, 1))
        assert "rank 1: in B alone; weights are compared" in found.notes
        assert any(note.startswith("the numbers of ranks differ") for note in found.notes)


def test_micro_batches_that_both_ranks_have_are_compared(runs: Path, tmp_path: Path) -> None:
    """On another number of processes. The control of the one above: rank 0 has micro-batch 0 alone, and its data are others here."""
    path = train_example.copy_with("other data", tmp_path)
    train_example.train(tmp_path / "b", path, steps=1)
    first = compare_runs(tmp_path / "b", runs / "example").first
    assert first is not None
    assert (first.step, first.culprit.direction, first.pair.entry.tensor) == (0, "before the forward", "batch[0]")
