"""`dash-attn verify` and caches: every token has the bits of the training forward, planted faults are seen, and nothing is claimed that
was not shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from dash_attn.backends.cpu import kv_cache
from dash_attn.backends.cpu.kv_cache import SequenceSlots
from dash_attn.cli.main import main
from dash_attn.tools.verify import guarantees
from dash_attn.tools.verify.cases import Case, Results, default_cases
from dash_attn.tools.verify.guarantees import CaseTest, Outcome, comparisons
from dash_attn.tools.verify.ways import PAGE_SIZES, can_decode

CLAIM, CONTROL = "decode-equals-training", "control: halves of the keys, recombined, differ"
SMALL_CASE = Case(300, 2, 1, 16, 2)
SMALL = ["--device", "cpu", "--no-fresh", "--runs", "2", "--seqlen", "400", "--heads", "2", "--head-dim", "16", "--batch", "1"]


def of_decoding(case: Case = SMALL_CASE) -> dict[str, Outcome]:
    """The outcomes that are about caches, without the others, which take time."""
    test = CaseTest(case, "cpu", 2)
    return {outcome.guarantee: outcome for outcome in (test._judge(CLAIM, test._decoded()), test._control_of_decoding())}


def test_the_certificate_claims_what_was_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "certificate.json"
    assert main(["verify", *SMALL, "--output", str(path)]) == 0
    out = capsys.readouterr().out
    assert any(line.split() == [CLAIM, "pass"] for line in out.splitlines())
    certificate = json.loads(path.read_text())
    assert f"flash_attn_with_kvcache where {CLAIM} is listed" in certificate["scope"]
    found = {outcome["guarantee"]: outcome for outcome in certificate["cases"][0]["guarantees"]}
    assert found[CLAIM]["status"] == found[CONTROL]["status"] == "pass"
    assert found[CLAIM]["detail"].startswith("6 compared: rows, pages of 16 and of 48 slots;")
    assert found[CONTROL]["detail"].startswith("out[0, 399, ")


@pytest.mark.parametrize("mask", ["documents:100,200", "window:60,20", "prefix:80"])
def test_masks_that_no_cache_has_are_not_claimed(mask: str) -> None:
    assert not can_decode(Case(300, mask=mask), "cpu")
    found = list(CaseTest(Case(300, 1, 1, 16, 1, mask), "cpu", 2).outcomes({}))
    assert len(found) > 4
    assert not {CLAIM, CONTROL} & {outcome.guarantee for outcome in found}


def test_which_cases_are_claimed() -> None:
    assert [can_decode(case, "cpu") for case in default_cases("cpu")] == [True, True, True, False, True]
    assert [can_decode(case, "cuda") for case in default_cases("cuda")] == [True, True, True, False]
    assert not can_decode(Case(300, head_dim=20), "cuda"), "the kernels read caches where they lie, in units of 16 bytes"
    assert can_decode(Case(300, head_dim=20), "cpu")


@pytest.mark.parametrize(
    "case",
    [
        Case(200, 3, 1, 16, 3, "window:40,0", "bf16"),
        Case(290, 2, 2, 24, 2, "full", "fp16"),
        Case(130, 1, 1, 16, 1, dtype="fp64"),
        Case(3, 1, 1, 16, 2),
    ],
    ids=str,
)
def test_masks_groups_and_dtypes(case: Case) -> None:
    assert {outcome.status for outcome in of_decoding(case).values()} == {"pass"}


def moved_on_the_grid(gather: Any) -> Any:
    """Keys counted from 16 slots later, as if the first page had been lost."""

    def wrong(cache: Tensor, sequence: SequenceSlots, low: int) -> Tensor:
        first = 16 if len(sequence.pages) > 1 else 0
        gathered: Tensor = gather(cache, sequence, max(low, first))
        return gathered[first:]

    return wrong


def one_slot_too_many(gather: Any) -> Any:
    """As if a kernel had an off-by-one in its last tile."""

    def wrong(cache: Tensor, sequence: SequenceSlots, low: int) -> Tensor:
        gathered: Tensor = gather(cache, sequence, low)
        gathered[-1:] = cache[sequence.at(sequence.end, sequence.end + 1)]
        return gathered

    return wrong


@pytest.mark.parametrize(
    ("fault", "said"),
    [(moved_on_the_grid, r"pages of 16: "), (one_slot_too_many, r"rows: .*nan")],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_fault_in_the_cache_is_seen(fault: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "_gather", fault(kv_cache._gather))
    outcome = of_decoding()[CLAIM]
    assert outcome.status == "fail"
    assert outcome.detail.startswith(said.partition(":")[0])
    assert said.partition("*")[2] in outcome.detail


def test_sinks_that_are_lost_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = kv_cache._attend
    monkeypatch.setattr(kv_cache, "_attend", lambda q, k, v, options, sinks: attend(q, k, v, options, None))
    outcome = of_decoding()[CLAIM]
    assert (outcome.status, outcome.detail.partition(":")[0]) == ("fail", "rows, with sinks")


def test_a_control_that_agrees_is_inconclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    def agrees(case: Case, inputs: Any, plain: Results) -> Results:
        return plain

    monkeypatch.setattr(guarantees, "recombined_halves", agrees)
    assert of_decoding()[CONTROL].status == "inconclusive"
    assert of_decoding(Case(1, 1, 1, 16, 1))[CONTROL].status == "inconclusive", "one key has no halves"


def test_progress_counts_comparisons() -> None:
    ticks: list[None] = []
    test = CaseTest(SMALL_CASE, "cpu", 2, lambda: ticks.append(None))
    assert test._judge("", test._decoded()).status == "pass"
    assert len(ticks) == 2 * len(PAGE_SIZES)
    ticks.clear()
    assert len(list(test.outcomes({}))) == 8
    assert len(ticks) == comparisons("cpu", 2, 0)
