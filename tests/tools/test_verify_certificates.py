"""Certificates of `dash-attn verify`: equal ones agree, others say what differs, damaged ones are refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dash_attn.cli.main import main
from dash_attn.tools.verify.cases import Case
from dash_attn.tools.verify.certificate import differences, read, refuse_failed, status_of, verify
from strategies import examples

SMALL = ["--device", "cpu", "--no-fresh", "--runs", "2", "--seqlen", "400", "--heads", "1", "--head-dim", "16", "--batch", "1"]
SMALL_CASE = Case(400, 1, 1, 16, 1)
JUNK = st.sampled_from([None, True, -1, 0, 2**70, 0.5, float("nan"), "", "x", [], {}, [[]], {"a": 1}, ["a"]])


def small_certificate(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["verify", *SMALL, "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_equal_certificates_agree(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "there.json"
    small_certificate(capsys, "--output", str(path))
    assert main(["verify", "--device", "cpu", "--no-fresh", "--runs", "2", "--against", str(path)]) == 0  # its cases are the default
    out = capsys.readouterr().out
    assert "causal 400" in out
    assert f"Agrees with {path}" in out


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (lambda entry: entry["sha256"].update(dk="0" * 64), "causal 400, 1/1 heads x 16, batch 1, fp32: bits of dk here"),
        (lambda entry: entry["explain"].update(order_hash="0" * 64), "order_hash here"),
        (lambda entry: entry["explain"].update(kernels={"backward": "1" * 64}), "kernels backward here nothing, there 111111111111"),
        (lambda entry: entry.update(inputs_sha256="0"), "the inputs differ"),
        (lambda entry: entry["case"].update(mask="full"), "not in the other certificate"),
    ],
)
def test_different_certificates_say_what_differs(
    plant: Any, said: str, small: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    certificate = copy.deepcopy(small)
    plant(certificate["cases"][0])
    certificate["versions"]["torch"] = "1.0"
    path = tmp_path / "there.json"
    path.write_text(json.dumps(certificate))
    assert main(["verify", *SMALL, "--against", str(path)]) == 1
    out = capsys.readouterr().out
    assert f"result: pass\nDiffers from {path}:\n" in out
    differing = out.split("Differs from")[1].splitlines()[1:]
    assert said in differing[0]
    assert all("for information, versions torch here" in line for line in differing[1:])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--runs 1", "--runs must be a whole number >= 2; got 1"),
        ("--dtype int8", "dtype must be one of fp64, fp32, bf16, fp16"),
        ("--heads 3 --kv-heads 2", "multiple of kv_heads"),
        ("--seqlen 0", "seqlen must be a whole number"),
        ("--mask documents:3,4", "sum of the document lengths"),
        ("--output nowhere/certificate.json", "no directory"),
        ("--against nowhere.json", "No such file"),
    ],
)
def test_bad_input(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--device", "cpu", *words.split()]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no json", "not JSON"),
        ("[]", "must be an object; got list"),
        ('{"certificate": 99}', "format 99 of certificates; this version of dash-attn reads formats up to 1"),
        ('{"certificate": 1, "device": {"type": "cpu"}, "versions": {"torch": "2.9"}, "cases": []}', "lacks cases"),
        ('{"certificate": 1, "device": {"type": "cpu"}, "versions": {"torch": "2.9"}, "cases": [{"case": {}}]}', "a case lacks guarantees"),
        (
            '{"certificate": 1, "device": ["cpu"], "versions": {"torch": "2.9"}, "cases": [{"case": {}}]}',
            "device must be an object; got ['cpu']",
        ),
        ('{"certificate": 1, "device": {"type": "cpu"}, "versions": {"torch": "2.9"}, "cases": [3]}', "a case lacks case"),
        ('{"certificate": 1, "device": {"type": "cpu"}, "versions": {"torch": "2.9"}, "cases": {"case": {}}}', "cases must be a list"),
    ],
)
def test_what_is_no_certificate(text: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "there.json"
    path.write_text(text)
    assert main(["verify", "--device", "cpu", "--against", str(path)]) == 2
    assert said in capsys.readouterr().err


@pytest.fixture(scope="module")
def small() -> Any:
    return verify([SMALL_CASE], "cpu", 2, fresh=False)


def compare_with(certificate: Any, path: Path) -> int:
    path.write_text(json.dumps(certificate))
    return main(["verify", *SMALL, "--against", str(path)])


def test_nobody_agrees_with_a_certificate_that_failed(small: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Its bits are those of one run; the next one on that machine had others."""
    failed = copy.deepcopy(small)
    failed["status"] = failed["cases"][0]["guarantees"][0]["status"] = "fail"
    assert compare_with(failed, tmp_path / "there.json") == 2
    out, err = capsys.readouterr()
    assert out == "", "before anything is run"
    assert "the promises were not kept (case 1, same bits in repeated runs: fail: 1 compared)" in err
    assert compare_with(small, tmp_path / "there.json") == 0, "the control"


@pytest.mark.parametrize(
    "plant",
    [
        lambda c: c["cases"][0]["guarantees"][0].update(status="fail"),  # while the certificate says pass
        lambda c: c.update(status="fail"),
        lambda c: c.update(status="passed"),
        lambda c: c.pop("status"),
        lambda c: c.update(status={}),  # what a set could not hold
        lambda c: c["cases"][0]["guarantees"][0].update(status="skipped"),
    ],
)
def test_a_status_that_is_no_pass_counts_wherever_it_stands(
    plant: Any, small: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    changed = copy.deepcopy(small)
    plant(changed)
    assert compare_with(changed, tmp_path / "there.json") == 2
    assert "the promises were not kept" in capsys.readouterr().err


def test_equal_bits_of_an_inconclusive_certificate_show_nothing(small: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    unsure = copy.deepcopy(small)
    unsure["status"] = unsure["cases"][0]["guarantees"][-1]["status"] = "inconclusive"
    assert compare_with(unsure, tmp_path / "there.json") == 1
    out = capsys.readouterr().out
    assert "which shows nothing, because it is inconclusive (case 1, control: halves of the keys, recombined, differ: inconclusive" in out
    assert "Agrees" not in out
    unsure["cases"][0]["sha256"]["dq"] = "0" * 64
    assert compare_with(unsure, tmp_path / "there.json") == 1
    assert "bits of dq here" in capsys.readouterr().out, "a difference is one all the same"


@given(data=st.data())
@examples(150)
def test_damaged_certificates_are_value_errors(small: Any, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    damaged = copy.deepcopy(small)
    parent, key = data.draw(st.sampled_from(list(places(damaged))))
    parent[key] = data.draw(JUNK)
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    path.write_text(json.dumps(damaged))
    try:
        found = read(path)
        refuse_failed(found, path)
        assert status_of(found) in ("pass", "inconclusive")
        differences(small, found)
    except ValueError as error:
        assert str(path) in str(error)  # noqa: PT017 (a refusal is one of two good outcomes)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value inside a JSON value."""
    for key, entry in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, key
        yield from places(entry)
