"""`dash-attn verify` passes on the CPU, and fails where something is planted that it should see."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dash_attn.backends.cpu import passes as cpu
from dash_attn.backends.cpu import tiles as cpu_tiles
from dash_attn.call.options import BACKENDS
from dash_attn.call.planning import AnyWorkers, plan_for
from dash_attn.cli import device as device_flags
from dash_attn.cli.device import choose_device, choose_served
from dash_attn.cli.main import main
from dash_attn.execution.run import run_plan
from dash_attn.tools.machine import device_facts
from dash_attn.tools.verify import guarantees, surroundings
from dash_attn.tools.verify.cases import NAMES, Case, Results, attend, default_cases, difference, make_inputs, sha256
from dash_attn.tools.verify.certificate import table, verify
from dash_attn.tools.verify.guarantees import CaseTest, Outcome, comparisons, worst
from dash_attn.tools.verify.surroundings import PROCESSES
from dense import dense, largest_error

SMALL = ["--device", "cpu", "--no-fresh", "--runs", "2", "--seqlen", "400", "--heads", "1", "--head-dim", "16", "--batch", "1"]
SMALL_CASE = Case(400, 1, 1, 16, 1)


def statuses(test: CaseTest) -> dict[str, Outcome]:
    return {outcome.guarantee: outcome for outcome in test.outcomes({})}


def small_certificate(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["verify", *SMALL, "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[list[Path]]:
    """What each fresh process finds in its cache. It leaves a file there, as if it had compiled something."""
    found: list[list[Path]] = []
    run = subprocess.run

    def watched(command: Any, **rest: Any) -> Any:
        if "env" in rest:
            found.append([*Path(rest["env"]["DASH_ATTN_CACHE"]).iterdir()])
            assert rest["env"]["PYTHONHASHSEED"] == "random"
            (Path(rest["env"]["DASH_ATTN_CACHE"]) / "compiled").touch()
        return run(command, **rest)

    monkeypatch.setattr(subprocess, "run", watched)
    return found


@pytest.mark.exhaustive
def test_the_command_passes_with_fresh_processes(capsys: pytest.CaptureFixture[str], tmp_path: Path, caches: list[list[Path]]) -> None:
    path = tmp_path / "certificate.json"
    words = [word for word in SMALL if word != "--no-fresh"]
    assert main(["verify", *words, "--output", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.endswith("result: pass\n")
    assert [len(files) for files in caches] == [0, 1], "first cold, then warm"
    assert "causal 400, 1/1 heads x 16, batch 1, fp32; alternating" in out
    certificate = json.loads(path.read_text())
    assert (certificate["status"], certificate["runs"], certificate["device"]["type"]) == ("pass", 2, "cpu")
    (entry,) = certificate["cases"]
    assert [(outcome["guarantee"], outcome["status"]) for outcome in entry["guarantees"]] == [
        ("same bits in repeated runs", "pass"),
        ("same bits in any interleaving", "pass"),
        ("same bits on any number of workers", "pass"),
        ("same bits while other work runs", "pass"),
        ("same bits whatever else is in the batch", "pass"),
        ("same bits in fresh processes", "pass"),
        ("control: unordered runs differ", "pass"),
        ("decode-equals-training", "pass"),
        ("control: halves of the keys, recombined, differ", "pass"),
    ]
    assert entry["guarantees"][5]["detail"] == "2 compared"
    assert len(entry["explain"]["order_hash"]) >= 16
    results = attend(SMALL_CASE, make_inputs(SMALL_CASE, "cpu"))
    assert entry["sha256"] == {name: sha256([x]) for name, x in zip(NAMES, results, strict=False)}


@pytest.mark.parametrize("case", default_cases("cpu"), ids=str)
@pytest.mark.exhaustive
def test_the_default_matrix_passes(case: Case) -> None:
    found = statuses(CaseTest(case, "cpu", 2))
    assert [outcome for outcome in found.values() if outcome.status != "pass"] == []


def test_unordered_execution_is_caught_and_its_first_element_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu, "run_plan", lambda plan, kernel, ordered, chosen: run_plan(plan, kernel, False, chosen))
    assert main(["verify", *SMALL, "--runs", "8"]) == 1  # tiles have up to four contributions: two of three interleavings add alike
    out = capsys.readouterr().out
    assert out.endswith("result: fail\n")
    said = re.search(r"any interleaving: fail: interleaving \d+.*: dq\[0, (\d+), 0, \d+\]: (\S+) against (\S+); \d+ of 6400 elements", out)
    assert said is not None
    assert int(said[1]) >= 256  # queries before attend two KV tiles, and two numbers add alike either way
    assert float(said[2]) != float(said[3])


def test_a_result_that_depends_on_the_batch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    unpack = cpu_tiles.from_tiles

    def depends(tiles: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
        return unpack(tiles, length, dtype) * (1 + (tiles.shape[0] > 1))

    monkeypatch.setattr(cpu_tiles, "from_tiles", depends)
    found = statuses(CaseTest(SMALL_CASE, "cpu", 2))
    assert [name for name, outcome in found.items() if outcome.status == "fail"] == ["same bits whatever else is in the batch"]
    assert found["same bits whatever else is in the batch"].detail.startswith("at position 0 of 3: out[0, 0, 0, 0]: ")


def test_memory_that_nobody_wrote_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    unpack = cpu_tiles.from_tiles
    monkeypatch.setattr(cpu_tiles, "from_tiles", lambda tiles, length, dtype: torch.empty_like(unpack(tiles, length, dtype)))
    found = statuses(CaseTest(SMALL_CASE, "cpu", 2))
    assert found["same bits in repeated runs"] == Outcome("same bits in repeated runs", "fail", "run 2: out[0, 0, 0, 0] is NaN")


def test_work_beside_it_is_real_and_must_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []
    monkeypatch.setattr(surroundings, "_cpu_work", lambda: lambda: rounds.append(1))
    with surroundings.other_work("cpu"):
        assert rounds, "it has begun before the block does"
    after = len(rounds)
    time.sleep(0.05)
    assert len(rounds) == after, "it ends with the block"

    def fails() -> None:
        raise ArithmeticError("out of numbers")

    monkeypatch.setattr(surroundings, "_cpu_work", lambda: fails)
    with pytest.raises(RuntimeError, match="nothing ran beside it: out of numbers"), surroundings.other_work("cpu"):
        pass


def test_what_changes_under_load_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    unpack, busy = cpu_tiles.from_tiles, surroundings.other_work
    loaded = False

    @contextmanager
    def noticed(device: str) -> Iterator[None]:
        nonlocal loaded
        with busy(device):
            loaded = True
            yield
            loaded = False

    monkeypatch.setattr(guarantees, "other_work", noticed)
    monkeypatch.setattr(cpu_tiles, "from_tiles", lambda tiles, length, dtype: unpack(tiles, length, dtype) * (1 + loaded))
    found = statuses(CaseTest(SMALL_CASE, "cpu", 2))
    assert found["same bits while other work runs"].status == "fail"
    assert found["same bits while other work runs"].detail.startswith("run 1 beside other work: out[0, 0, 0, 0]: ")


def test_fresh_processes_are_compared() -> None:
    test = CaseTest(SMALL_CASE, "cpu", 2)
    here = attend(SMALL_CASE, make_inputs(SMALL_CASE, "cpu"))

    def outcome_of(found: Results) -> Outcome:
        results = dict(zip(PROCESSES, (here, found), strict=True))
        (outcome,) = (outcome for outcome in test.outcomes(results) if "fresh" in outcome.guarantee)
        return outcome

    assert outcome_of(here) == Outcome("same bits in fresh processes", "pass", "2 compared")
    failed = outcome_of(here._replace(dv=here.dv + 1))
    assert failed.status == "fail"
    assert failed.detail.startswith("a fresh process with a warm cache: dv[0, 0, 0, 0]: ")


def test_progress_counts_every_comparison() -> None:
    seen: list[tuple[int, int]] = []
    verify([SMALL_CASE, SMALL_CASE], "cpu", 3, fresh=False, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == list(range(1, len(seen) + 1))
    assert seen[-1][0] == seen[-1][1] == 2 * comparisons("cpu", 3, 0)


def test_a_schedule_can_be_chosen_and_promises_no_more_than_it_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    """The blocks of `shift` depend on the workers."""
    certificate = small_certificate(capsys, "--mask", "full", "--schedule", "shift")
    (entry,) = certificate["cases"]
    assert (entry["case"]["schedule"], entry["explain"]["schedule"]) == ("shift", "shift")
    assert "same bits on any number of workers" not in [outcome["guarantee"] for outcome in entry["guarantees"]]
    assert main(["verify", *SMALL, "--schedule", "fastest"]) == 2
    assert "schedule must be one of auto, ascending" in capsys.readouterr().err


def test_a_table_of_cases_that_promise_different_things() -> None:
    certificate = verify([SMALL_CASE, replace(SMALL_CASE, mask="full", schedule="shift")], "cpu", 2, fresh=False)
    line = next(line for line in table(certificate).splitlines() if line.startswith("same bits on any number of workers"))
    assert line.split()[-2:] == ["pass", "-"]


def test_certificates_name_what_was_used(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = small_certificate(capsys)
    assert {"dash_attn", "commit", "torch", "cuda", "python", "system"} <= set(certificate["versions"])
    assert certificate["scope"]
    where = SimpleNamespace(name="NVIDIA Nonesuch", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: where)
    monkeypatch.setattr("dash_attn.tools.machine.driver_facts", lambda: {"driver_version": "580.1"})
    assert device_facts("cuda") == {"type": "cuda", "name": "NVIDIA Nonesuch", "capability": "9.0", "sms": 132, "driver": "580.1"}


def test_a_control_that_agrees_is_inconclusive(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *SMALL, "--seqlen", "200"]) == 1  # two KV tiles: the order of two numbers does not matter
    out = capsys.readouterr().out
    assert "unordered runs differ: inconclusive" in out
    assert out.endswith("result: inconclusive\n")


def test_where_nothing_can_be_unordered_the_control_reverses_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on backend triton."""
    monkeypatch.setattr(guarantees, "ALWAYS_ORDERED", ("cpu",))
    found = statuses(CaseTest(SMALL_CASE, "cpu", 2))
    assert found["control: another order of sums differs"].status == "pass"
    assert "control: unordered runs differ" not in found
    exact = CaseTest(SMALL_CASE, "cpu", 2)
    exact.inputs = tuple(torch.zeros_like(x) for x in exact.inputs)  # type: ignore[assignment]
    exact.reference = exact._run()
    assert exact._control().status == "inconclusive"


def test_the_backend_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert small_certificate(capsys, "--backend", "cpu")["cases"][0]["explain"]["backend"] == "cpu"
    assert main(["verify", *SMALL, "--backend", "triton"]) == 2
    assert "--backend triton needs a GPU, and this would run on the CPU (--device)" in capsys.readouterr().err


def test_settings_are_restored() -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        attend(SMALL_CASE, make_inputs(SMALL_CASE, "cpu"))
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


RING = Case(17 * 128, 1, 1, 8, 1, "full")
PAIRS = replace(RING, mask="causal", schedule="symmetric_shift")
ANY_NUMBER = "same bits on any number of workers"


@pytest.mark.parametrize("case", [RING, PAIRS, SMALL_CASE], ids=["ring", "pairs", "small"])
def test_every_number_of_workers_is_tried(case: Case) -> None:
    """Also fewer than the chains that wait for each other, of which the first two have nine."""
    test = CaseTest(case, "cpu", 2)
    assert test.explain().guarantees[2] == "worker-count-invariant"
    assert test._worker_counts() == Outcome(ANY_NUMBER, "pass", "5 compared")


def test_an_order_that_depends_on_the_workers_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few workers get the order of another schedule: that would run, with other bits."""
    plan_on_any = cpu.plan_on_any
    test = CaseTest(RING, "cpu", 2)
    monkeypatch.setattr(cpu, "plan_on_any", lambda p, name, workers: plan_on_any(p, "alternating" if workers < 9 else name, workers))
    outcome = test._worker_counts()
    assert (outcome.guarantee, outcome.status) == (ANY_NUMBER, "fail")
    assert outcome.detail.startswith("1 workers: dq[")


def test_a_refusal_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    test = CaseTest(RING, "cpu", 2)
    monkeypatch.setattr(cpu, "plan_on_any", lambda *asked: AnyWorkers(plan_for(*asked)))
    outcome = test._worker_counts()
    assert (outcome.guarantee, outcome.status) == (ANY_NUMBER, "fail")
    assert outcome.detail.startswith("refused on 1 workers: auto (here shift_blocks) needs 9 workers at once")


def test_differences_are_of_bits() -> None:
    zeros = Results(*(torch.zeros(2, 3) for _ in NAMES))
    assert difference(zeros, Results(*(x.clone() for x in zeros.named.values()))) is None
    negative = zeros._replace(dk=torch.tensor([[0.0, 0, 0], [0, -0.0, -0.0]]))
    assert difference(negative, zeros) == "dk[1, 1]: -0.0 against 0.0; 2 of 6 elements differ"
    nan = zeros._replace(lse=torch.full((2, 3), torch.nan))
    assert difference(nan, nan) is None
    assert difference(zeros, zeros._replace(out=torch.zeros(2, 2))) == "out is torch.float32 [2, 3] against torch.float32 [2, 2]"


def test_inputs_are_those_documented_and_the_results_are_attention() -> None:
    inputs = make_inputs(SMALL_CASE, "cpu")
    draw = torch.randint(-(2**20), 2**20, (4, 1, 400, 1, 16), generator=torch.Generator("cpu").manual_seed(0))
    assert torch.equal(inputs[0], (draw.sum(0).double() / 2**20).float())
    assert sha256(inputs) == "d0c6cb7f6b80cc334059742b0335f99f07c6f927878df4ef089eeea791bb07f5"  # of any machine
    results = attend(SMALL_CASE, inputs)
    out, _ = dense(*(x.double() for x in inputs[:3]), SMALL_CASE.read_mask())
    assert largest_error(results.out, out) < 1e-5


def test_the_worst_status_counts() -> None:
    assert worst(["pass"]) == "pass"
    assert worst(["pass", "inconclusive"]) == "inconclusive"
    assert worst(["inconclusive", "fail", "pass"]) == worst(["pass", None]) == "fail"


def test_device_is_the_cpu_unless_there_is_a_hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert choose_device("auto") == "cpu"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert (choose_device("auto"), choose_device("cpu")) == ("cuda", "cpu")
    with monkeypatch.context() as amd:
        amd.setattr(torch.version, "hip", "7.0")
        assert choose_device("auto") == "cpu", "an AMD GPU of the same number is another"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == "cpu"
    with pytest.raises(ValueError, match="no GPU"):
        choose_device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", default_cases("cuda"), ids=str)
def test_the_default_matrix_passes_on_the_gpu(case: Case) -> None:
    found = statuses(CaseTest(case, "cuda", 5))
    assert [outcome for outcome in found.values() if outcome.status != "pass"] == []


def test_a_saved_schedule_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From `plan --save` to a certificate, and again from the certificate."""
    saved, certificate = tmp_path / "weave.json", tmp_path / "certificate.json"
    assert main(["plan", "--seqlen", "512", "--schedule", "weave", "--save", str(saved)]) == 0
    shape = ["--seqlen", "512", "--heads", "1", "--batch", "1", "--device", "cpu", "--runs", "2", "--no-fresh"]
    assert main(["verify", *shape, "--schedule", str(saved), "--output", str(certificate)]) == 0
    assert "weave (given)" in capsys.readouterr().out
    explained = json.loads(certificate.read_text())["cases"][0]["explain"]
    assert (explained["schedule"], explained["guarantees"][1]) == ("weave (given)", "batch-invariant")
    assert main(["verify", "--against", str(certificate), "--device", "cpu", "--runs", "2", "--no-fresh"]) == 0
    assert main(["verify", *shape, "--mask", "full", "--schedule", str(saved)]) == 2
    assert "it is for mask causal; the call has mask full" in capsys.readouterr().err
    assert main(["verify", *shape, "--schedule", str(tmp_path / "none.json")]) == 2
    assert "--schedule: cannot read" in capsys.readouterr().err


def test_a_gpu_that_a_backend_serves_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(device_flags.BACKENDS) == set(BACKENDS), "the commands list them without importing them"
    assert choose_served("auto") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for trouble, chosen in ((None, "cuda"), ("too old", "cpu")):
        monkeypatch.setattr(device_flags, "gpu_trouble", lambda trouble=trouble: trouble)
        assert choose_served("auto") == chosen
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"a GPU of compute capability 8.0 or later is needed"):
        choose_served("cuda")


@pytest.mark.parametrize(("capability", "named"), [((9, 0), None), ((8, 6), None), ((7, 5), "has 7.5")])
def test_why_a_gpu_is_not_served(capability: tuple[int, int], named: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from dash_attn.backends import _backend_of_gpu
    from dash_attn.backends.hopper.support import sm_count
    from dash_attn.backends.triton import support

    major, minor = capability
    properties = SimpleNamespace(name="GPU", major=major, minor=minor, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(support, "check_triton", lambda: None)
    caches = (_backend_of_gpu, sm_count, support.architecture_of)
    try:
        for cached in caches:
            cached.cache_clear()
        found = device_flags.gpu_trouble()
    finally:
        for cached in caches:
            cached.cache_clear()
    assert (found is None) if named is None else (found is not None and named in found)
