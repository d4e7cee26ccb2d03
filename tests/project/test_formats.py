"""Every format has a version: what a newer dash-attn wrote is refused by an error that names both, and what is older is read.

Files without a version were written before 1.0 (tests/old_files, read in test_old_files.py).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import predict
from benchmarks.result_files import read as read_results
from dash_attn import formats
from dash_attn.backends.hopper.driver.compile import MAGIC, DamagedFile, Kernel, read_kernel, write_kernel
from dash_attn.cli.main import main
from dash_attn.formats import Format
from dash_attn.invariance import record
from dash_attn.scheduling import Schedule
from dash_attn.simulation.machines import SHIPPED
from dash_attn.tools.calibrate.pictures import read as read_predictions
from dash_attn.tools.verify.certificate import read as read_certificate
from doc_pages import rows

ROOT = Path(__file__).parents[2]
OLD = ROOT / "tests" / "old_files"
ALL = {name: value for name, value in vars(formats).items() if isinstance(value, Format)}
PLAN = ["plan", "--q-tiles", "4", "--schedule"]
READ = {  # what reads a file, and one that is read
    "CERTIFICATES": (read_certificate, OLD / "certificate.json"),
    "MACHINES": (read_predictions, OLD / "machine.json"),
    "PREDICTIONS": (read_predictions, ROOT / "benchmarks/results/h200-prediction.json"),
    "RESULTS": (read_results, OLD / "results.json"),
    "SCHEDULES": (lambda path: Schedule.from_json(path.read_text()), OLD / "schedule-alternating.json"),
}
PRINTED = {"COMPARISONS", "DIAGNOSES", "PLANS"}
IN_OTHER_WAYS = {"LEDGERS", "PROBES"}  # a byte of the mark; a fact among others, which name the file


def planted(path: Path, folder: Path, **fields: Any) -> Path:
    """A copy with other fields."""
    copy = folder / path.name
    copy.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return copy


def test_every_format_is_tested_here() -> None:
    assert {*READ, *PRINTED, *IN_OTHER_WAYS} == set(ALL)


def test_the_page_has_every_format() -> None:
    """docs/stability.md: the field of each, and what becomes of a file without it."""
    found = {field.split(",")[0].strip("`"): without for _, _, field, without, _ in rows((ROOT / "docs/stability.md").read_text(), 5)}
    assert found["the eighth byte"] == "refused"
    assert {known.field for known in ALL.values()} - {""} <= set(found)
    files = {name: found[ALL[name].field] for name in READ}
    assert files == {name: "format 1" if ALL[name].unmarked else "refused" for name in READ}


@pytest.mark.parametrize("name", READ)
def test_a_newer_file_is_refused_by_both_versions(name: str, tmp_path: Path) -> None:
    """Also where nothing else in it would be refused, and where it has fields that nobody knows here."""
    (read, path), known = READ[name], ALL[name]
    read(path)
    read(planted(path, tmp_path, **known.mark))
    said = f"has format {known.newest + 1} of {known.kind}; this version of dash-attn reads formats up to {known.newest}"
    for more in ({}, {"from_the_future": 1}):
        with pytest.raises(ValueError, match=said):
            read(planted(path, tmp_path, **{known.field: known.newest + 1}, **more))


@pytest.mark.parametrize("version", [0, -1, True, 1.0, "1", None, [1]], ids=repr)
@pytest.mark.parametrize("name", READ)
def test_what_is_no_version_is_refused(name: str, version: Any, tmp_path: Path) -> None:
    read, path = READ[name]
    with pytest.raises(ValueError, match=f"must have '{ALL[name].field}', the format of {ALL[name].kind}: 1 up to"):
        read(planted(path, tmp_path, **{ALL[name].field: version}))


@pytest.mark.parametrize("name", [name for name in READ if not ALL[name].unmarked])
def test_what_always_had_a_version_needs_it(name: str) -> None:
    with pytest.raises(ValueError, match="got None"):
        ALL[name].check({}, "it")


def test_commands_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = "format 2 of {}; this version of dash-attn reads formats up to 1"
    assert main([*PLAN, "auto", "--machine", str(planted(OLD / "machine.json", tmp_path, machine=2))]) == 2
    assert said.format("machine files") in capsys.readouterr().err
    assert main(["verify", "--device", "cpu", "--against", str(planted(OLD / "certificate.json", tmp_path, certificate=2))]) == 2
    assert said.format("certificates") in capsys.readouterr().err
    assert main(["verify", "--device", "cpu", "--schedule", str(planted(OLD / "schedule-alternating.json", tmp_path, schedule=2))]) == 2
    assert said.format("schedules") in capsys.readouterr().err


def test_a_newer_ledger_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(OLD / "ledger", tmp_path / "run")
    file = tmp_path / "run" / "rank-0.ledger"
    data = file.read_bytes()
    assert data[7] == formats.LEDGERS.newest
    file.write_bytes(data[:7] + bytes([formats.LEDGERS.newest + 1]) + data[8:])
    assert main(["diff", str(tmp_path / "run"), str(OLD / "ledger")]) == 2
    assert "format 2 of ledgers; this version of dash-attn reads formats up to 1" in capsys.readouterr().err


def test_a_newer_record_of_probes_is_neither_used_nor_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name differs, so it is left alone: here everything is tried again."""
    monkeypatch.setenv("DASH_ATTN_CACHE", str(tmp_path))
    ours = record.Record({**formats.PROBES.mark, "gpu": "a GPU"})
    newer = record.Record({**ours.surroundings, "probe": 2})
    newer.put("a product", "a verdict of another kind")
    assert ours.path != newer.path
    assert ours.get("a product") is None
    assert record.records() == []
    ours.put("a product", [1, None])
    assert record.Record(ours.surroundings).get("a product") == [1, None]
    assert [found["surroundings"] for found in record.records()] == [ours.surroundings]


def test_a_kept_kernel_of_another_format_is_not_loaded(tmp_path: Path) -> None:
    """One that was compiled here is compiled again; one that came with the package raises."""
    path = tmp_path / "kernel.cubin"
    write_kernel(path, Kernel(b"code", "symbol", "", "13.0"))
    assert read_kernel(path) is not None
    path.write_bytes(path.read_bytes().replace(MAGIC, b"dash-attn-cubin-3\n"))
    with pytest.raises(DamagedFile):
        read_kernel(path)


def test_what_is_written_begins_with_its_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "schedule.json"
    assert main([*PLAN, "ascending,spt", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 2
    assert main([*PLAN, "auto", "--save", str(saved), "--json"]) == 0
    (one, ranks) = (json.loads(capsys.readouterr().out), ["plan", "--ranks", "2", "--seqlen", "4096", "--heads", "2", "--json"])
    assert main(ranks) == 0
    rows += [one, json.loads(capsys.readouterr().out)]
    assert [next(iter(row.items())) for row in rows] == [("plan", 1)] * 4
    assert main(["diff", str(OLD / "ledger"), str(OLD / "ledger"), "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert main(["diff", "nowhere", "nowhere", "--json"]) == 2
    for value, known in (
        (compared, formats.COMPARISONS),
        (json.loads(capsys.readouterr().out), formats.COMPARISONS),
        (json.loads(saved.read_text()), formats.SCHEDULES),
        (SHIPPED["h200"].to_json(), formats.MACHINES),
    ):
        assert next(iter(value.items())) == (known.field, known.newest)


def test_predictions_are_written_with_their_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`predict compare` adds to a file, and keeps what it says of itself."""
    stored = json.loads((ROOT / "benchmarks/results/h200-prediction.json").read_text())
    small = tmp_path / "small.json"
    rows = [row for row in stored["rows"] if row["seqlen"] == 1024][:2]
    small.write_text(json.dumps({**formats.PREDICTIONS.mark, "environment": stored["environment"], "rows": rows}))
    predict.compare(small)
    assert json.loads(small.read_text())["predictions"] == 1
    assert read_predictions(small)["gpu"] == "NVIDIA H200"
    with pytest.raises(ValueError, match="format 2 of predictions"):
        predict.compare(planted(small, tmp_path, predictions=2))
