"""Suites and `dash-attn bench` without a GPU: files, tables and errors, from made-up results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench_results import failed, made_up_results
from bench_stand_ins import fake_times
from benchmarks.result_files import print_report, read
from benchmarks.suite import main
from dash_attn.cli import bench
from dash_attn.cli.main import main as command
from dash_attn.tools.bench.report import save, summary
from dash_attn.tools.bench.shape import SUITES as SHORT
from dash_attn.tools.bench.shape import Suite

HOST = {"status": "ok", "median_us": 123.4, "p20_us": 100.0, "p80_us": 150.0}


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "deep" / "results.json"
    save(made_up_results(), path)
    return path


def test_a_stored_file_is_read_back(stored: Path) -> None:
    assert read(stored) == made_up_results()
    assert [p.name for p in stored.parent.iterdir()] == ["results.json"]


@pytest.mark.parametrize("text", ["no JSON", "[]", '{"format": 99, "rows": []}', '{"format": 1}'])
def test_other_files_are_refused(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    assert main(["--from", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_summary() -> None:
    results = made_up_results()
    said = summary(results, Path("x.json"))
    assert said["shapes"] == 24
    assert said["backward_ratio_to_cudnn"] == said["forward_ratio_to_cudnn"] == pytest.approx(1.1)
    assert said["backward_ordered_over_unordered"] == pytest.approx(1.1 / 1.25)
    assert said["failed"] == 0
    results["rows"] = [row for row in results["rows"] if row["candidate"] != "cuDNN"]
    for row in results["rows"]:
        row["ratio_to_cudnn"] = None
    assert summary(results, Path("x.json"))["backward_ratio_to_cudnn"] is None


def test_last_line_is_json(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--from", str(stored)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1])["path"] == str(stored)
    assert sum("dash-attn unordered" in line for line in lines) == 8  # two passes, four kinds of shape


def test_tables_show_speeds_and_why_some_are_missing(capsys: pytest.CaptureFixture[str]) -> None:
    results = made_up_results()
    rows = results["rows"]
    at = next(i for i, row in enumerate(rows) if row["candidate"] == "dash-attn" and row["pass"] == "backward")
    rows[at] = failed(rows[at], "failed check", "dq is off")
    print_report(results)
    out = capsys.readouterr().out
    assert "550 (1.10)" in out
    assert out.count("failed check") == 2  # in its cell and among the reasons
    assert "dash-attn backward, causal, head dim 64: failed check (dq is off)" in out
    assert "FlashAttention-4: not installed (ImportError)" in out


def test_exit_code_tells_that_ours_failed(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = made_up_results()
    results["rows"][0] = failed(results["rows"][0], "failed check", "out is off")
    save(results, stored)
    assert main(["--from", str(stored)]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["failed"] == 1


def test_host_results_are_shown(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = {"candidate": "dash-attn", **HOST}
    bad = {"candidate": "cuDNN", "status": "unavailable", "reason": "RuntimeError: none"}
    save({**made_up_results(), "suite": "host", "rows": [], "host": [good, bad]}, stored)
    assert main(["--from", str(stored)]) == 0
    out = capsys.readouterr().out
    assert "123.4" in out
    assert "cuDNN: unavailable (RuntimeError: none)" in out
    assert json.loads(out.splitlines()[-1])["host_us"] == {"dash-attn": 123.4}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("suite", ["paper", "quick", "gqa", "llama", "masks", "host"])
def test_no_gpu(suite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([suite, "--output", str(tmp_path)]) == 2
    if suite in SHORT or suite == "host":
        assert command(["bench", "--suite", suite, "--output", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("needs a CUDA GPU") == said.count("\n")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole command with a small suite, a timer that does not wait and no GPU."""
    monkeypatch.setattr(bench, "require_gpu", lambda backend: None)
    monkeypatch.setattr(bench, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr("dash_attn.tools.machine.gpu_environment", lambda backend: {"gpu": "NVIDIA N100"})
    monkeypatch.setattr("dash_attn.tools.bench.measure.cuda_times", fake_times)
    monkeypatch.setitem(SHORT, "quick", Suite((128,), (32,), ("causal",), ((2, 2),)))
    monkeypatch.setattr("dash_attn.tools.bench.shape.TOKENS", 128)


@pytest.mark.usefixtures("on_the_cpu")
def test_the_whole_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours and PyTorch's, and nobody else's."""
    assert command(["bench", "--repeats", "2", "--output", str(tmp_path)]) == 0
    results = read(tmp_path / "n100-quick.json")
    found = {(row["candidate"], row["pass"]): row["status"] for row in results["rows"]}
    of_pytorch = {"cuDNN", "PyTorch flash", "PyTorch flash deterministic", "PyTorch efficient"}
    assert {name for name, _ in found} == {"dash-attn", "dash-attn unordered", *of_pytorch}
    assert found["dash-attn", "forward"] == found["dash-attn", "backward"] == found["PyTorch flash", "backward"] == "ok"
    out = capsys.readouterr().out
    assert "backward: causal, head dim 32" in out
    assert "cuDNN forward, causal, head dim 32: unavailable (RuntimeError" in out
    assert json.loads(out.splitlines()[-1])["failed"] == 0


@pytest.mark.usefixtures("on_the_cpu")
def test_the_host_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("dash_attn.tools.bench.host.measure_host", lambda device, wait: [{"candidate": "dash-attn", **HOST}])
    assert command(["bench", "--suite", "host", "--output", str(tmp_path)]) == 0
    assert read(tmp_path / "n100-host.json")["host"][0]["median_us"] == 123.4
    assert "123.4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repeats", "0"], "--repeats"),
        (["--masks", "window"], "window"),
        (["paper", "--head-dims", "96"], "96"),
        (["--plot", "speed.gif"], "speed.gif"),
        (["--from", "nowhere.json"], "nowhere.json"),
    ],
)
def test_bad_input_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("words", [["--seqlens", "12,x"], ["--seqlens", ","], ["fast"]])
def test_bad_words(words: list[str]) -> None:
    assert main(words) == 2
    assert command(["bench", *(words if len(words) > 1 else ["--suite", *words])]) == 2
