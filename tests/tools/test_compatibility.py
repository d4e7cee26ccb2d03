"""tools/compatibility.py: what it asks pip for, what it reads in the report of the tests, and what the page makes of it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

import compatibility
import compatibility_page
from compatibility import COMBINATIONS, LIMIT, NVRTC_12, TESTS, Combination, complaint, counted, one_of_each, record, run
from compatibility_page import made

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
REPORT = """<testsuites><testsuite>
<testcase classname="tests.scheduling.test_golden" name="test_a" />
<testcase classname="tests.scheduling.test_golden" name="test_b[causal]"><failure message="wrong">...</failure></testcase>
<testcase classname="tests.integrations.test_sdpa" name="test_c"><skipped message="no GPU" /></testcase>
<testcase classname="tests.integrations.test_sdpa" name="test_d"><skipped message="no GPU" /></testcase>
<testcase classname="" name="tests.integrations.test_torch_flash"><error message="cannot be imported" /></testcase>
<testcase classname="" name="tests.integrations.test_megatron_core">
<skipped message="collection skipped">('test.py', 9, 'Skipped: no Megatron (here)')
</skipped></testcase>
</testsuite></testsuites>"""


def row(**more: Any) -> dict[str, Any]:
    tests = {room: {"passed": 2, "skipped": {}, "failed": []} for room in TESTS}
    return {
        "commit": "0123abcd",
        "versions": {"python": "3.10.1"},
        "compiled": None,
        "tests": {**tests, "seconds": 60},
        "seconds": 90,
        **more,
    }


def test_every_python_and_both_ends_of_pytorch_are_asked_for() -> None:
    assert {asked.python for asked in COMBINATIONS.values()} == set(re.findall(r"Python :: (3\.\d+)", PROJECT))
    (pinned,) = re.findall(r"^torch==([\d.]+)", (ROOT / "constraints-dev.txt").read_text(), re.MULTILINE)
    asked = [asked.versions.get("torch", pinned) for asked in COMBINATIONS.values()]
    (least,) = re.findall(r'"torch>=([\d.]+)"', PROJECT)
    minors = {version.rsplit(".", 1)[0] for version in asked}
    assert {least, "2.13"} < minors


def test_what_is_run_is_there_and_takes_three_minutes() -> None:
    assert LIMIT <= 180
    files = [path for paths in TESTS.values() for path in paths]
    assert [path for path in files if not (ROOT / path).exists()] == []
    assert len(set(files)) == len(files)


def test_versions_are_exact_and_all_else_is_pinned() -> None:
    asked = Combination("3.12", {"torch": "2.10.0", "triton": ""})
    assert {"torch==2.10.0", "transformers", "pytest"} <= set(asked.required)
    assert not {"triton", "triton=="} & set(asked.required), "left to pip"
    lines = asked.constraints().splitlines()
    assert not [line for line in lines if line.startswith(("torch==", "triton=="))]
    assert [line for line in lines if line.startswith("transformers==")]


def test_where_kernels_are_compiled_alone_no_test_is_run() -> None:
    asked = COMBINATIONS["nvrtc-12.8.93"]
    assert not asked.runs
    assert f"{NVRTC_12}==12.8.93" in asked.required
    assert "transformers" not in asked.required


def test_a_python_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match=r"needs Python 3.11 on the PATH"):
        run("pinned", 1)


def test_the_report_is_counted_by_room() -> None:
    found = counted(REPORT)
    assert found["schedules"] == {"passed": 1, "skipped": {}, "failed": ["test_golden::test_b[causal]"]}
    assert found["SDPA"] == {"passed": 0, "skipped": {"no GPU": 2}, "failed": []}
    assert found["flash operators"]["failed"] == ["test_torch_flash::tests.integrations.test_torch_flash"]
    assert found["Megatron-Core"]["skipped"] == {"no Megatron (here)": 1}
    assert found["ledger"] == {"passed": 0, "skipped": {}, "failed": []}


def test_one_variant_of_each_kernel() -> None:
    names = [name.split("<")[0] for _, name in one_of_each()]
    assert len(set(names)) == len(names) > 10
    assert {"attention_forward", "attention_backward", "attention_decode"} < set(names)


@pytest.mark.skipif(sys.platform != "linux", reason="NVRTC's wheels")
def test_a_kernel_that_does_not_compile_is_told() -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")
    assert complaint(("ledger/bit_sums.cuh", "bit_sums")) == ""
    assert complaint(("ledger/bit_sums.cuh", "no_such_kernel")).startswith("no_such_kernel: NVRTC could not compile")


def test_the_page_tells_what_failed_what_was_stopped_and_what_is_missing() -> None:
    failing = row(tests={**row()["tests"], "SDPA": {"passed": 1, "skipped": {"no plug": 3}, "failed": ["test_sdpa::test_c"]}})
    page = made({"pinned": failing, "oldest": row(tests={"stopped": 180})})
    assert "| 19 passed, 3 skipped, **1 failed** | 60 | 0123abcd |" in page
    assert "- `pinned`, SDPA: `test_sdpa::test_c`" in page
    assert "- `pinned`, SDPA: 3 (no plug)" in page
    assert "stopped after 180 seconds" in page
    assert "| combination `newest` | not yet |" in page
    assert "combination `pinned`" not in page
    clean = made({name: row() for name in COMBINATIONS})
    assert "failed" not in clean.replace("What failed", "")
    assert "not yet" not in clean


def test_the_page_tells_what_compiled_and_what_did_not() -> None:
    versions = {"nvidia-cuda-nvrtc": "13.0.88", "cuda-bindings": "13.5.0"}
    compiled = {"nvrtc": "13.0", "kernels": 18, "complaints": ["end_trips<64, 64> spills"]}
    page = made(
        {"pinned": row(versions=versions, compiled=compiled), "newest": row(versions=versions, compiled={**compiled, "complaints": []})}
    )
    assert "| 13.0.88 | `pinned` | 13.5.0 | 18 | `end_trips<64, 64> spills` |" in page
    assert "| 13.0.88 | `newest` | 13.5.0 | 18 | all compile, and none spills |" in page
    assert "no NVRTC" in made({"pinned": row()})


def test_rows_are_of_combinations_that_are_asked_for() -> None:
    rows = record()
    assert set(rows) <= set(COMBINATIONS)
    for name, found in rows.items():
        wrong = {library: version for library, version in COMBINATIONS[name].versions.items() if version}
        assert {library: found["versions"][library].partition("+")[0] for library in wrong} == wrong
        assert found["versions"]["python"].startswith(COMBINATIONS[name].python)
    assert compatibility_page.page() == made(rows)
