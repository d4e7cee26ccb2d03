"""Files that version 0.1.0 wrote at 531d6b6 can be read: schedules, a machine file, a certificate, results, a ledger with a resumed stint.

They are in tests/old_files and are never written again.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.result_files import read as read_results
from dash_attn.cli.main import main
from dash_attn.ledgers import read_run
from dash_attn.scheduling import GENERATORS, Schedule, generate, lower
from dash_attn.tools.bench.report import heading, tables
from dash_attn.tools.machine import device_facts, process_environment, version_facts

FILES = Path(__file__).parents[1] / "old_files"
SCHEDULES = sorted(FILES.glob("schedule-*.json"))


@pytest.mark.parametrize("path", SCHEDULES, ids=lambda path: path.stem)
def test_schedules(path: Path) -> None:
    text = path.read_text().strip()
    schedule = Schedule.from_json(text)
    assert schedule.name in GENERATORS
    made = generate(schedule.name, schedule.problem, 16)
    assert lower(schedule).order_hash == lower(made).order_hash, "what was written is what is made today"


def test_all_kinds_are_here() -> None:
    assert len(SCHEDULES) == 6
    assert {path.name for path in FILES.iterdir()} - {path.name for path in SCHEDULES} == {
        "certificate.json",
        "exact-ledger",
        "ledger",
        "machine.json",
        "results.json",
        "results-host.json",
    }


def test_a_machine_file(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--q-tiles", "4", "--kv-tiles", "4", "--heads", "2", "--head-dim", "64", "--machine", str(FILES / "machine.json"), "--json"]
    assert main(["plan", *words]) == 0
    assert json.loads(capsys.readouterr().out)


def test_a_certificate(capsys: pytest.CaptureFixture[str]) -> None:
    """Another kind of CPU has other bits; that is an answer, too."""
    main(["verify", "--against", str(FILES / "certificate.json"), "--runs", "2", "--no-fresh", "--device", "cpu"])
    assert "case 1" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["results", "results-host"])
def test_results(name: str) -> None:
    results = read_results(FILES / f"{name}.json")
    shown = {title: cells for title, _, cells in tables(results)}
    assert len(shown) == (4 if results["rows"] else 1)
    assert all(row[0].startswith("dash-attn") for row, *_ in shown.values())
    assert "NVIDIA H200" in heading(results)


def test_a_ledger(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(FILES / "ledger"), str(FILES / "ledger")]) == 0
    assert "The runs agree" in capsys.readouterr().out


def test_facts_have_their_names() -> None:
    """So that a comparison with an old file shows what is different, and nothing that is only called differently."""
    old = read_run(FILES / "ledger")[0].environment
    new = process_environment()
    assert set(old) - {"world_size", "doctor"} == set(new)  # those are the ledger's own
    assert set(old["cpu"]) == set(new["cpu"])
    assert {"python", "dash_attn", "torch"} <= set(old["versions"]) & set(new["versions"])
    certificate = json.loads((FILES / "certificate.json").read_text())
    assert set(certificate["device"]) == set(device_facts("cpu"))
    assert set(certificate["versions"]) == set(version_facts("cpu", "auto"))
