"""Files that a command cannot write are noticed before any work; files that it cannot read are one line."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dash_attn
from benchmarks import result_files, suite
from benchmarks.result_files import print_report
from dash_attn.cli import bench, calibrate, demo, plan
from dash_attn.cli.main import main
from dash_attn.simulation.machines import SHIPPED, Calibrated, load_machine
from dash_attn.tools.bench.report import summary
from dash_attn.tools.calibrate import pictures
from strategies import examples

ROOT = Path(__file__).parents[2]
STORED = ROOT / "benchmarks" / "results"
FILES = {
    "plan --gantt": "p.png",
    "plan --trace": "p.json",
    "plan --schedule auto --save": "p.json",
    "plan --measured --seqlen 300 --gantt": "p.svg",
    "suite --plot": "p.png",
    "suite --plot-schedules": "p.png",
    "calibrate --plot": "p.png",
    "calibrate --plot-schedules": "p.svg",
    "calibrate --output": "machine.json",
    "verify --output": "certificate.json",
}
PICTURES = [command for command, name in FILES.items() if name.endswith(("png", "svg"))]


@pytest.fixture(autouse=True)
def _no_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Commands that would begin to work fail here."""

    def worked(*_: object, **__: object) -> Any:
        raise AssertionError("it has begun to work")

    for module, name in (
        (plan, "simulate_all"),
        (plan, "choose"),
        (bench, "require_gpu"),
        (calibrate, "choose"),
        (demo, "_show_training"),
    ):
        monkeypatch.setattr(module, name, worked)
    monkeypatch.setattr("dash_attn.cli.verify._choose_cases", worked)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")


def run(words: list[str]) -> int:
    """A command, or benchmarks/suite.py."""
    return suite.main(words[1:]) if words[0] == "suite" else main(words)


def said(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    assert run(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    return line


@pytest.mark.parametrize(("command", "name"), FILES.items(), ids=FILES)
def test_a_file_that_cannot_be_written_is_noticed_at_once(command: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    flag = command.split()[-1]
    Path(name).mkdir()
    assert f"{flag}: cannot write {name}: it is a directory" in said(capsys, [*command.split(), name])
    assert f"{flag}: cannot write nowhere/{name}: there is no directory nowhere" in said(capsys, [*command.split(), f"nowhere/{name}"])
    assert f"{flag}: cannot write file/{name}: there is no directory file" in said(capsys, [*command.split(), f"file/{name}"])
    assert f"{flag}: cannot write /proc/{name}: " in said(capsys, [*command.split(), f"/proc/{name}"])


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="an administrator may write anywhere")
@pytest.mark.parametrize(("command", "name"), FILES.items(), ids=FILES)
def test_a_file_without_permission_is_noticed_at_once(command: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("locked").mkdir(mode=0o500)
    assert "Permission denied" in said(capsys, [*command.split(), f"locked/{name}"])


@pytest.mark.parametrize("command", PICTURES)
def test_a_picture_that_nobody_can_draw_is_noticed_at_once(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "a picture is written as .png or .svg; got 'p.gif'" in said(capsys, [*command.split(), "p.gif"])


@pytest.mark.parametrize("command", ["bench --output", "suite --output", "demo --output"])
def test_a_folder_that_cannot_be_made_is_noticed_at_once(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--output: cannot write to file: file is not a directory" in said(capsys, [*command.split(), "file"])
    assert "--output: cannot write to file/x/y: file is not a directory" in said(capsys, [*command.split(), "file/x/y"])
    assert "--output: cannot write to /proc/x: " in said(capsys, [*command.split(), "/proc/x"])


@pytest.mark.parametrize(("command", "name"), FILES.items(), ids=FILES)
def test_files_that_can_be_written_are_left_alone(command: str, name: str) -> None:
    """The control: the work begins, and what is there is as it was."""
    Path(name).write_text("as it was")
    before = sorted(Path().iterdir())
    with pytest.raises(AssertionError, match="begun to work"):
        run([*command.split(), name])
    assert Path(name).read_text() == "as it was"
    assert sorted(Path().iterdir()) == before


def test_two_files_are_not_written_over_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--trace and --gantt name the same file" in said(capsys, ["plan", "--gantt", "a.png", "--trace", "./a.png"])
    assert "--from and --plot name the same file" in said(capsys, ["calibrate", "--from", "a.png", "--plot", "a.png"])
    assert "--against and --output name the same file" in said(capsys, ["verify", "--output", "a", "--against", "a"])


@pytest.mark.parametrize("command", ["verify --against", "suite --from", "calibrate --plot p.png --from"])
def test_a_file_that_cannot_be_read_is_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("folder").mkdir()
    Path("bytes").write_bytes(b"\xff\xfe\x00")
    Path("deep").write_text("[" * 100_000)
    for name, why in {
        "nowhere": "No such file or directory",
        "folder": "Is a directory",
        "bytes": "not even text",
        "file": "it is not JSON",
        "deep": "nested too deeply",
    }.items():
        line = said(capsys, [*command.split(), name])
        assert why in line
        assert name in line


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("plan --threads 4", "goes with --measured; without it nothing is run"),
        ("plan --device cpu", "goes with --measured; without it nothing is run"),
        ("plan --head-dim 64", "--head-dim goes with --machine or --measured"),
        ("plan --workers 99999999999999999999", "--workers must be a whole number from 1 to 2147483647"),
        ("plan --overlap 99999999999999999999", "--overlap must be a whole number from 0 to 2147483647"),
        ("plan --q-tiles 999999999", "at most 268,435,456 tiles"),
        ("plan --seqlen 100000000", "at most 268,435,456 tiles"),
    ],
)
def test_what_would_be_ignored_or_cannot_fit_is_refused(words: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert why in said(capsys, words.split())


def test_verify_refuses_tensors_beyond_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.undo()
    assert "must be at most 2147483648; got causal 2000000000," in said(capsys, ["verify", "--seqlen", "2000000000"])


JUNK = st.sampled_from([None, True, -1, 0, 2**70, 0.5, 1e300, float("nan"), "", "x", "full", [], {}, [[]], {"a": 1}, ["a"], [1, 2]])


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key, entry in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, key
        yield from places(entry)


def damage(data: st.DataObject, value: Any) -> Any:
    """One to three values replaced or removed."""
    damaged = copy.deepcopy(value)
    for _ in range(data.draw(st.integers(1, 3))):
        found = list(places(damaged))
        if not found:
            break
        parent, key = data.draw(st.sampled_from(found))
        if data.draw(st.booleans()):
            parent[key] = copy.deepcopy(data.draw(JUNK))
        else:
            del parent[key]
    return damaged


@given(data=st.data())
@examples(300)
def test_damaged_machines_are_value_errors(data: st.DataObject) -> None:
    value = damage(data, json.loads(json.dumps(SHIPPED["h200"].to_json())))
    try:
        found = Calibrated.from_json(value)
    except ValueError:
        return
    assert all(rows >= 1 for tiles in found.tiles.values() for rows in tiles)
    assert found.workers >= 1


def test_fractional_tiles_of_a_machine_are_not_cut(tmp_path: Path) -> None:
    value = SHIPPED["h200"].to_json()
    value["head_dims"]["64"]["tiles"] = [64.5, 128]
    (tmp_path / "machine.json").write_text(json.dumps(value))
    with pytest.raises(ValueError, match=r"machine\.json is not a machine file: head_dims\.64\.tiles must be a whole number .*; got 64\.5"):
        load_machine(str(tmp_path / "machine.json"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["h200-paper-fa4.json", "h200-host.json"])
@given(data=st.data())
@examples(60)
def test_damaged_results_are_value_errors(name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    value = json.loads((STORED / name).read_text())
    value["rows"] = value["rows"][:3]
    value.pop("cases", None)
    path = tmp_path_factory.getbasetemp() / "damaged-results.json"
    path.write_text(json.dumps(damage(data, value)))
    try:
        found = result_files.read(path)
    except ValueError as error:
        assert str(path) in str(error)  # noqa: PT017 (a refusal is one of two good outcomes)
        return
    print_report(found)
    summary(found, path)


@given(data=st.data())
@examples(100)
def test_damaged_predictions_are_value_errors(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    value = json.loads((STORED / "h200-prediction.json").read_text())
    value["rows"] = value["rows"][:3]
    path = tmp_path_factory.getbasetemp() / "damaged-predictions.json"
    path.write_text(json.dumps(damage(data, value)))
    try:
        found = pictures.read(path)
    except ValueError as error:
        assert str(path) in str(error)  # noqa: PT017 (a refusal is one of two good outcomes)
        return
    assert all(row["measured_us"] / row["predicted_us"] > 0 for row in found["rows"])


@pytest.mark.parametrize("path", sorted(STORED.glob("h200-*.json")), ids=lambda path: path.name)
def test_stored_results_are_read(path: Path) -> None:
    """The control: nothing that we wrote ourselves is refused."""
    assert (pictures if "prediction" in path.name else result_files).read(path)["rows"] or "host" in path.name


def test_dir_names_what_is_there() -> None:
    assert set(dash_attn.__all__) <= set(dir(dash_attn))
    assert all(hasattr(dash_attn, name) for name in dir(dash_attn))
    code = "import sys, dash_attn; assert {'flash_attn_func', 'explain'} <= set(dir(dash_attn)); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "False\n", "asking for the names imports nothing"


def test_the_package_runs_as_a_command() -> None:
    words = ["plan", "--mask", "full", "--q-tiles", "4", "--schedule", "shift", "--json"]
    done = subprocess.run([sys.executable, "-m", "dash_attn", *words], capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(done.stdout)["schedule"] == "shift"
    wrong = subprocess.run(
        [sys.executable, "-m", "dash_attn", "plan", "--q-tiles", "0"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (wrong.returncode, wrong.stderr) == (2, "dash-attn: error: --q-tiles must be a whole number >= 1; got 0\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
@pytest.mark.parametrize(("words", "code"), [("plan --schedule auto", 0), ("plan --schedule none", 2)])
def test_closed_streams_are_no_error(closed: str, words: str, code: int) -> None:
    command = f'"{sys.executable}" -m dash_attn.cli.main {words} {closed}'
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
