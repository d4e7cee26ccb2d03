"""tools/fuzz.py: its calls are the same for a seed, agree with the definition, and find planted faults; parts go on where they stopped."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import evidence_page
import fuzz
from dash_attn import Causal
from dash_attn.attention import functions
from dash_attn.ledgers import format as ledger_format
from dash_attn.scheduling import json_fields
from dense import random_inputs, run_ours, same_bits
from fuzzing import damage, record, soak, training
from fuzzing.calls import FUNCTIONS, draw
from fuzzing.faults import FAULTS, planted
from fuzzing.trying import Outcome, attempt
from kept_pairs import kept_pairs, kept_pairs_at_once
from sampled_rows import at_keys, at_queries, worst


class AsOnAGpu(str):
    """Draws what a GPU gets, on the CPU."""

    def __eq__(self, other: object) -> bool:
        return other == "cuda"

    def __hash__(self) -> int:
        return hash("cuda")


def test_a_number_is_one_call() -> None:
    for number in range(8):
        one, other = draw(4, number, "cpu"), draw(4, number, "cpu")
        assert one.words == other.words
        assert all(same_bits(one.leaves[name], other.leaves[name]) for name in one.leaves)
    assert draw(4, 0, "cpu").words != draw(5, 0, "cpu").words


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_each_function_agrees(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzzing.calls.FUNCTIONS", {function: 1})
    found = [attempt(11, number, "cpu") for number in range(2 if function.__name__ == "played" else 6)]
    assert [one.failure for one in found if one.failure] == []
    assert any(not one.refusal for one in found)


def test_what_a_gpu_gets_agrees() -> None:
    found = [attempt(3, number, AsOnAGpu("cpu")) for number in range(20)]
    assert [one.failure for one in found if one.failure] == []
    dtypes = {draw(3, number, AsOnAGpu("cpu")).leaves.popitem()[1].dtype for number in range(20)}
    assert dtypes <= {torch.bfloat16, torch.float16, torch.float32}  # the last are sinks


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name: str) -> None:
    found = fuzz.calls_until_found(name)
    assert found is not None
    assert attempt(0, found - 1, "cpu").failure == "", "the fault is gone again"


def test_a_failure_says_how_to_have_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    with planted("a stale row of the cache"):
        assert fuzz.main(["--calls", "3"]) == 1
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("python"))
        words = line.partition("  #")[0].split()
        assert words[:4] == ["python", "tools/fuzz.py", "--device", "cpu"]
        assert fuzz.main(words[2:]) == 1
        assert "flash_attn_with_kvcache: the cache holds something else after the call" in capsys.readouterr().out
    assert fuzz.main(words[2:]) == 0


def test_a_part_ends_where_everything_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As after a kernel that has lost the CUDA context."""
    monkeypatch.setattr(fuzz, "attempt", lambda *_: Outcome("flash_attn_func", failure="a lost context"))
    assert fuzz.main(["--calls", "1000"]) == 1
    assert capsys.readouterr().out.count("a lost context") == fuzz.MOST_FAILURES


def test_only_expected_errors_of_ours_are_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anything else would swallow the coverage."""

    def refusing(error: Exception) -> list[str]:
        def check(*_: Any, **__: Any) -> None:
            raise error

        monkeypatch.setattr(functions, "check_options", check)
        return [attempt(0, number, "cpu").refusal for number in range(6) if draw(0, number, "cpu").function == "flash_attn_func"]

    assert not any(refusing(ValueError("backend 'hopper' takes no such thing")))  # raised here, not by the library
    assert not any(refusing(KeyError("q")))
    message = "dropout needs a seed for each document: lay them end to end"
    outcomes = [attempt(0, number, "cpu") for number in range(6)]
    assert all(one.failure for one in outcomes if one.function == "flash_attn_func")
    assert fuzz_refusal(message) == message
    assert fuzz_refusal("q must be 4-d (batch, length, heads, head dim)") == ""


def fuzz_refusal(message: str) -> str:
    """Of an error that a module of the library raised."""
    from fuzzing.trying import documented

    code = compile(f"raise ValueError({message!r})", functions.__file__, "exec")
    try:
        exec(code)
    except ValueError as error:
        return documented(error)
    return "nothing was raised"


def test_pairs_that_dropout_keeps_are_those_of_the_definition() -> None:
    for seed, head in ((0, 0), (2**61 + 5, 3), (-7, 1)):
        assert torch.equal(kept_pairs_at_once(seed, head, 35, 52, 0.3), kept_pairs(seed, head, 35, 52, 0.3))


def test_parts_go_on_where_they_stopped(tmp_path: Path) -> None:
    path = tmp_path / "evidence.json"
    for calls in (2, 3):
        assert fuzz.main(["--part", "9", "--calls", str(calls), "--output", str(path)]) == 0
    one, other = record.read(path)
    assert [(part["first"], part["calls"]) for part in (one, other)] == [(0, 2), (2, 3)]
    assert {"commit", "machine", "versions", "seconds", "seed"} <= set(one)
    assert sum(sum(counts.values()) for counts in other["functions"].values()) == 3
    assert not path.with_suffix(".lock").exists()


@pytest.mark.parametrize(("device", "minutes"), [("cpu", "21"), ("cuda", "10"), ("cpu", "0")])
def test_parts_are_short(device: str, minutes: str) -> None:
    with pytest.raises(SystemExit, match="--minutes must be above 0 and at most"):
        fuzz.main(["--device", device, "--minutes", minutes])


@pytest.mark.parametrize("name", damage.FORMATS)
def test_damaged_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    found = [damage.attempt(name, 0, number, tmp_path) for number in range(40)]
    assert [why for outcome, why in found if outcome == "failed"] == []
    assert {"read", "refused"} == {outcome for outcome, _ in found}


def outcomes(name: str, tmp_path: Path) -> set[str]:
    return {why for outcome, why in (damage.attempt(name, 0, number, tmp_path) for number in range(60)) if outcome == "failed"}


def test_a_ledger_without_checksums_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = ledger_format._record_at

    def believing(path: Path, file: Any, place: int) -> Any:
        """Takes what is there for what was written, so that flipped bits of times and sums pass."""
        with monkeypatch.context() as inside:
            inside.setattr(ledger_format.zlib, "crc32", lambda data: AnyNumber())
            return healthy(path, file, place)

    class AnyNumber:
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    monkeypatch.setattr(ledger_format, "_record_at", believing)
    assert "a damaged ledger agrees with the whole one" in outcomes("ledger", tmp_path)


def test_a_schedule_whose_numbers_are_clipped_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dash_attn.scheduling.problem.as_whole", lambda value, *_, **__: min(abs(int(value)), 400))
    assert json_fields.as_whole(5, "") == 5
    assert outcomes("schedule", tmp_path)


def test_a_read_that_does_not_end_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*_: Any) -> None:
        while True:
            pass

    monkeypatch.setattr(damage, "SECONDS", 1)
    monkeypatch.setitem(damage.FORMATS, "results", damage.FORMATS["results"]._replace(read=endless))
    assert damage.attempt("results", 0, 0, tmp_path) == ("failed", "not read within 1 seconds")


@pytest.mark.exhaustive
def test_a_training_that_was_killed_agrees() -> None:
    found = training.twice(40, "cpu")
    assert training.agrees(found, 40)
    assert len(found["killed_at"]) == training.KILLS


def test_a_training_must_agree_in_everything() -> None:
    good = {"exit_code": 0, "steps": 40, "weights": ["a", "a"]}
    assert training.agrees(good, 40)
    assert not any(training.agrees({**good, **bad}, 40) for bad in ({"exit_code": 3}, {"steps": 39}, {"weights": ["a", "b"]}))


def test_a_soak_goes_on_with_what_has_not_passed() -> None:
    part = {"kind": "soak", "device": "cuda", "commit": "c", "repeats": 1000, "seconds": 60.0}
    parts: list[dict[str, Any]] = [{**part, "tests": {"a": "passed", "b": "failed"}}, {**part, "repeats": 10, "tests": {"c": "passed"}}]
    assert soak.passed_before(parts, "c", 1000) == {"a"}
    assert soak.passed_before(parts, "c", 10) == {"a", "c"}
    assert soak.passed_before(parts, "another", 10) == set()
    recorder = record.Recorder(None, {"tests": {}})
    plugin = soak.Plugin(recorder, {"a"}, lambda: False)
    items = [SimpleNamespace(nodeid=name) for name in "abc"]
    config = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: None))
    plugin.pytest_collection_modifyitems(config, items)  # type: ignore[arg-type]
    assert [item.nodeid for item in items] == ["b", "c"]
    plugin.pytest_runtest_logreport(SimpleNamespace(when="call", outcome="passed", nodeid="b"))
    assert recorder.part == {"tests": {"b": "passed"}, "left": 1}
    with pytest.raises(pytest.exit.Exception, match="time of this part is up"):
        plugin.pytest_runtest_setup(None)  # type: ignore[arg-type]
    assert all((soak.ROOT / test).exists() for test in soak.TESTS)


def test_some_rows_of_a_long_sequence_are_judged() -> None:
    """What tests/gpu/test_gpu_large.py rests on. The control: rows of other places."""
    inputs = random_inputs(300, 300, (1, 1), 32, torch.bfloat16)
    ours, some = run_ours(inputs, Causal()), torch.tensor([0, 1, 64, 200, 299])
    assert worst(at_queries(inputs, ours, some)) < 1
    assert worst(at_keys(inputs, ours, some)) < 1
    assert worst(at_queries(inputs, ours._replace(dq=ours.dq.roll(1, 1)), some)) > 1
    assert worst(at_keys(inputs, ours._replace(dk=ours.dk.roll(1, 1)), some)) > 1


def calls_part(**changes: Any) -> dict[str, Any]:
    where = {"machine": {"name": "x", "capability": "y"}, "versions": {"torch": "2", "python": "3"}, "commit": "c" * 40, "seconds": 60.0}
    counts = {"flash_attn_func": {"agreed": 4, "refused": 1, "failed": 0}}
    part = {"kind": "calls", "device": "cpu", "seed": 1, "first": 5, "calls": 5, "functions": counts, "refusals": {"no": 1}, "failures": []}
    return {**part, **where, **changes}


def test_the_page_counts_and_names_what_is_missing() -> None:
    good = evidence_page.made({"cpu": [calls_part(), calls_part(seed=2)], "cuda": []})
    assert "**10 calls: 0 failures.** 2 were refused." in good
    assert "| 1 | 5 | 5 to 9 | 0 | 1.0 | ccccccccc |" in good
    assert "99,990 of 100,000 random calls" in good
    assert "soak --device cuda" in good
    bad = evidence_page.made({"cpu": [calls_part(failures=["off: python tools/fuzz.py --only 7"], calls=100_000)], "cuda": []})
    assert "**100,000 calls: 1 failures.**" in bad
    assert "`off: python tools/fuzz.py --only 7`" in bad
    assert "of 100,000 random calls on the CPU" not in bad


def test_the_page_wants_a_soak_until_no_test_is_left() -> None:
    part = calls_part(kind="soak", device="cuda", repeats=1000, tests={"a": "passed", "b": "failed"}, left=3)
    assert "| 1,000 | 1 | 1 | 0 | 3 | 1.0 | ccccccccc |" in evidence_page.made({"cpu": [], "cuda": [part]})
    assert "soak --device cuda" in evidence_page.made({"cpu": [], "cuda": [part]})
    assert "soak --device cuda" not in evidence_page.made({"cpu": [], "cuda": [part, {**part, "left": 0}]})
