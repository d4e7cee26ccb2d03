"""`dash-attn verify --ranks`: what ranks share has the bits of one, planted faults are seen, and nothing is claimed that was not shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dash_attn import backends
from dash_attn.cli import verify as command
from dash_attn.cli.main import main
from dash_attn.distributed.context.loopback import Mailbox
from dash_attn.scheduling.order import CONTEXT_PARALLEL_INVARIANT, promises
from dash_attn.tools.verify import guarantees
from dash_attn.tools.verify.cases import Case, Results, attend, cases_to_share, difference, make_extras, make_inputs
from dash_attn.tools.verify.certificate import verify
from dash_attn.tools.verify.guarantees import CaseTest, Outcome, comparisons
from dash_attn.tools.verify.ways import check_ranks, name_of, on_ranks

SMALL_CASE = Case(512, 2, 1, 16, 1)
SMALL = ["--device", "cpu", "--no-fresh", "--runs", "2", "--seqlen", "512", "--heads", "2", "--kv-heads", "1"]
SMALL += ["--head-dim", "16", "--batch", "1"]
CLAIM = "context-parallel-invariant (1, 2 ranks)"
CONTROL = "control: sums per rank, added up, differ"


def of_ranks(case: Case = SMALL_CASE, ranks: tuple[int, ...] = (1, 2)) -> dict[str, Outcome]:
    """The outcomes that are about ranks, without the others, which take time."""
    test = CaseTest(case, "cpu", 2, ranks=ranks)
    return {outcome.guarantee: outcome for outcome in (test._judge(name_of(ranks), test._shared()), test._control_of_ranks())}


def test_the_certificate_claims_what_was_played(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "certificate.json"
    assert main(["verify", *SMALL, "--ranks", "2,1,2", "--output", str(path)]) == 0
    out = capsys.readouterr().out
    assert any(line.startswith(CLAIM) and line.endswith("pass") for line in out.splitlines())
    certificate = json.loads(path.read_text())
    assert (certificate["status"], certificate["ranks"]) == ("pass", [1, 2])
    assert "played by one process" in certificate["scope"]
    found = {outcome["guarantee"]: outcome for outcome in certificate["cases"][0]["guarantees"]}
    assert promises(found, CONTEXT_PARALLEL_INVARIANT)
    assert found[CLAIM]["detail"].startswith("8 compared: zigzag and contiguous, with and without sinks")
    assert found[CONTROL]["status"] == "pass"
    assert found[CONTROL]["detail"].startswith("2 ranks: dk[")


def test_without_ranks_nothing_is_claimed() -> None:
    certificate = verify([Case(384, 1, 1, 16, 1)], "cpu", 2, fresh=False)
    assert certificate["ranks"] == []
    assert "process" not in certificate["scope"]
    assert not promises([outcome["guarantee"] for outcome in certificate["cases"][0]["guarantees"]], CONTEXT_PARALLEL_INVARIANT)


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        (Case(768, 3, 1, 16, 2, "window:200,60", "bf16"), (3,)),
        (Case(1024, 1, 1, 16, 1, "full"), (2, 4)),  # shift_blocks: chains go round
        (Case(1024, 2, 2, 16, 1, "prefix:300", "fp16", "alternating"), (4,)),
        (Case(708, 2, 1, 16, 1, "documents:333,300,75"), (2, 3)),  # chunks that are no multiples of a tile
    ],
    ids=str,
)
def test_masks_groups_and_dtypes(case: Case, ranks: tuple[int, ...]) -> None:
    assert {outcome.status for outcome in of_ranks(case, ranks).values()} == {"pass"}


def rounded(state: torch.Tensor) -> torch.Tensor:
    return state.bfloat16().to(state.dtype)


@pytest.mark.parametrize("fault", [rounded, torch.zeros_like], ids=["a state rounded to bf16", "a hop left out"])
def test_a_state_that_arrives_changed_is_seen(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    send = Mailbox.send
    monkeypatch.setattr(Mailbox, "send", lambda self, document, unit, state: send(self, document, unit, fault(state)))
    outcome = of_ranks()[CLAIM]
    assert outcome.status == "fail"
    assert outcome.detail.startswith("2 ranks, zigzag: dk[0, 0, 0, ")


def test_a_gradient_of_the_sinks_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = "dash_attn.distributed.context.of_rank.sum_in_order"
    monkeypatch.setattr(sums, lambda parts: parts.flip(0).sum(0) * (1 + 2**-20))
    outcome = of_ranks()[CLAIM]
    assert outcome.status == "fail"
    assert outcome.detail.startswith("2 ranks, zigzag, with sinks: dsinks[0]")


def test_sinks_and_a_gradient_of_the_lse_matter() -> None:
    """The control: else nothing would have been tested with them."""
    inputs, extras = make_inputs(SMALL_CASE, "cpu"), make_extras(SMALL_CASE, "cpu")
    plain = attend(SMALL_CASE, inputs, extras=extras)
    assert plain.dsinks is not None
    (_, found), (_, other) = on_ranks(SMALL_CASE, inputs, [2], extras)
    assert difference(found, plain) is difference(other, plain) is None
    for changed in (extras._replace(sinks=extras.sinks + 1), extras._replace(dlse=extras.dlse * 2)):
        (_, found), _ = on_ranks(SMALL_CASE, inputs, [2], changed)
        assert "of 16384 elements differ" in str(difference(found._replace(out=plain.out, lse=plain.lse), plain))
    assert difference(plain._replace(dsinks=None), plain) == "results are out, lse, dq, dk, dv against out, lse, dq, dk, dv, dsinks"


def test_a_control_that_agrees_is_inconclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    def agrees(case: Case, inputs: Any, ranks: int, plain: Results) -> Results:
        return plain

    monkeypatch.setattr(guarantees, "added_up", agrees)
    outcome = of_ranks()[CONTROL]
    assert outcome.status == "inconclusive"
    assert "2 ranks, added up, have the bits of one" in outcome.detail


@pytest.mark.parametrize("ranks", [(1, 2, 4), (3,), (2, 5)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_default_cases_are_long_enough(ranks: tuple[int, ...], device: str) -> None:
    cases = cases_to_share(device, ranks)
    assert {case.mask.split(":")[0] for case in cases} == {"causal", "full", "window"}
    assert all(case.seqlen % (2 * count * 128) == 0 for case in cases for count in ranks)
    check_ranks([case for case in cases if case.seqlen <= 2048] if device == "cpu" else [], "cpu", ranks)


@pytest.fixture
def hopper_without_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    find_spec = backends.find_spec
    monkeypatch.setattr(backends, "find_spec", lambda name: None if name.endswith("hopper.ranks") else find_spec(name))
    backends.import_ranks.cache_clear()
    yield
    backends.import_ranks.cache_clear()


@pytest.mark.usefixtures("hopper_without_devices")
def test_a_backend_that_cannot_share_is_refused_before_the_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NotImplementedError, match=r"backend 'hopper' .* cannot share a sequence between ranks"):
        verify([SMALL_CASE], "cuda", 2, ranks=(1, 2))
    monkeypatch.setattr(command, "choose_served", lambda wanted: "cuda")
    assert main(["verify", "--ranks", "2"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "error: backend 'hopper' (cuda tensors) cannot share a sequence between ranks in this version of dash-attn; 'cpu' can" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--ranks 1", "--ranks must have a number from 2 to 999, like 1,2,4: one rank alone shares nothing; got '1'"),
        ("--ranks 0,2", "--ranks must be whole numbers >= 1, separated by commas; got '0,2'"),
        ("--ranks two", "--ranks must be whole numbers >= 1"),
        ("--ranks 2,1000", "--ranks must have a number from 2 to 999"),
        ("--ranks 2 --seqlen 500", "2 ranks cannot share causal 500, 4/2 heads x 64, batch 2, fp32 (zigzag): chunks must be multiples"),
        ("--ranks 2 --seqlen 700", "4 chunks of equal length fit sequences of 512 or 1024 rows"),  # though two of them are joined
        ("--ranks 2 --seqlen 512 --mask full --schedule shift", "order that is a function of the sequence alone; that of shift is not"),
    ],
)
def test_what_cannot_be_shared_is_refused_before_the_work(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--device", "cpu", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err


def test_ranks_are_checked_without_the_command_line() -> None:
    for ranks in ((1,), (0, 2)):
        with pytest.raises(ValueError, match="one rank alone shares nothing"):
            check_ranks([SMALL_CASE], "cpu", ranks)


def test_progress_counts_comparisons_on_ranks() -> None:
    ticks: list[None] = []
    test = CaseTest(SMALL_CASE, "cpu", 2, lambda: ticks.append(None), (2,))
    assert test._judge("", test._shared()).status == "pass"
    assert len(ticks) == comparisons("cpu", 2, 0, (2,)) - comparisons("cpu", 2, 0)
