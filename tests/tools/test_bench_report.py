"""`dash-attn bench` without a GPU: files, tables and errors, from made-up results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from bench_results import failed, made_up_results
from dash_attn.cli.main import main
from dash_attn.tools.bench.report import print_report
from dash_attn.tools.bench.results import read, save, summary


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
    assert main(["bench", "--from", str(path)]) == 2
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
    assert main(["bench", "--from", str(stored)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1])["path"] == str(stored)
    assert sum("dash-attn unordered" in line for line in lines) == 8  # two passes, four kinds of shape


@pytest.mark.parametrize("with_rich", [True, False])
def test_tables_show_speeds_and_why_some_are_missing(
    with_rich: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_rich:
        for module in [m for m in sys.modules if m.split(".")[0] == "rich"] + ["rich", "rich.box"]:
            monkeypatch.setitem(sys.modules, module, None)
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
    assert main(["bench", "--from", str(stored)]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["failed"] == 1


def test_host_results_are_shown(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = {"candidate": "dash-attn", "status": "ok", "median_us": 123.4, "p20_us": 100.0, "p80_us": 150.0}
    bad = {"candidate": "cuDNN", "status": "unavailable", "reason": "RuntimeError: none"}
    save({**made_up_results(), "suite": "host", "rows": [], "host": [good, bad]}, stored)
    assert main(["bench", "--from", str(stored)]) == 0
    out = capsys.readouterr().out
    assert "123.4" in out
    assert "cuDNN: unavailable (RuntimeError: none)" in out
    assert json.loads(out.splitlines()[-1])["host_us"] == {"dash-attn": 123.4}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("suite", ["paper", "quick", "gqa", "llama", "masks", "host"])
def test_no_gpu(suite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--suite", suite, "--output", str(tmp_path)]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repeats", "0"], "--repeats"),
        (["--masks", "window"], "window"),
        (["--head-dims", "96", "--suite", "paper"], "96"),
        (["--plot", "speed.gif"], "speed.gif"),
        (["--from", "nowhere.json"], "nowhere.json"),
    ],
)
def test_bad_input_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("words", [["--seqlens", "12,x"], ["--seqlens", ","], ["--suite", "fast"]])
def test_bad_words(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *words])
