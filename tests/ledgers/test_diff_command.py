"""The command `dash-attn diff`: JSON, help, and what it takes for long runs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dash_attn.cli.main import main
from dash_attn.ledgers.format import END, HEAD, LAYOUT, MARK, STEP, STEP_FIELDS, Entry, as_json, framed
from small_runs import AGREE, DIFFER, ERROR, FILE, INCOMPLETE, run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps. Not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run(folder)
    return folder


def test_json_is_printed_on_every_exit(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "shorter", 3)
    run(tmp_path / "other", before_step=lambda step, model, _: model.weight.data.zero_())
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / FILE).write_bytes(b"something else")
    asked = {"shorter": "incomplete", "other": "differ", "damaged": "error", "nowhere": "error", str(whole): "agree"}
    for name, verdict in asked.items():
        capsys.readouterr()
        code = main(["diff", str(whole), str(tmp_path / name), "--json"])
        found = json.loads(capsys.readouterr().out)
        assert (found["verdict"], found["exit_code"], found["agree"]) == (verdict, code, verdict == "agree")
    for words in (["--rank", "nine"], ["--no-such-option"], ["a third run"]):
        assert main(["diff", "a", "b", "--json", *words]) == 2
        assert json.loads(capsys.readouterr().out)["verdict"] == "error"


def test_the_exit_codes_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["diff", "--help"])
    shown = capsys.readouterr().out
    page = (Path(__file__).parents[2] / "docs" / "ledger.md").read_text()
    for code in (AGREE, DIFFER, ERROR, INCOMPLETE):
        assert f"\n  {code}  " in shown
        assert f"\n| {code} | " in page


STEPS, TENSORS = 5000, 2000


def large_ledger(folder: Path, seed: int) -> Path:
    """Of tensors that no other seed has."""
    folder.mkdir()
    entries = [Entry("gradient", f"layers.{place}", "weight", "float32", (4, 4)) for place in range(TENSORS)]
    sums = np.random.default_rng(seed).integers(2**63, size=(STEPS, TENSORS), dtype=np.uint64)
    head = {"first_step": 0, "rank": 0, "world_size": 1, "environment": {}}
    with (folder / FILE).open("wb") as file:
        file.write(MARK + framed(HEAD, as_json(head)) + framed(LAYOUT, as_json({"entries": entries, "attention": []})))
        for step in range(STEPS):
            file.write(framed(STEP, STEP_FIELDS.pack(step, 0.0, 0, 0) + sums[step].tobytes()))
        file.write(framed(END, as_json({"next_step": STEPS, "reason": ""})))
    return folder


MEASURED = """
import pathlib, re, sys
from dash_attn.cli.main import main
code = main(sys.argv[1:])
print(code, re.search(r"VmHWM:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1], file=sys.stderr)
"""


def test_long_runs_that_differ_everywhere_take_little_time_and_memory(tmp_path: Path) -> None:
    a, b = (large_ledger(tmp_path / str(seed), seed) for seed in range(2))
    for option, told in (((), f"Steps that differ: {STEPS} of {STEPS}."), (("--first",), "Later steps were not compared (--first).")):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, "diff", str(a), str(b), *option], capture_output=True, text=True, timeout=120, check=True
        )
        code, kilobytes = done.stderr.split()
        assert int(code) == DIFFER
        assert told in done.stdout
        assert time.perf_counter() - start < 20  # 1 s here
        assert int(kilobytes) < 200 * 1024  # 47 MiB here: PyTorch alone would take more
