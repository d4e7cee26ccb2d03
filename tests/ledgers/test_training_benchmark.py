"""benchmarks/training.py on a CPU: all that it tells of a run and its ledgers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dash_attn

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
def test_what_a_ledger_costs_is_told(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.training",
        "--small",
        "--steps",
        "5",
        "--only",
        "dash_attn, deterministic",
        "--json",
        str(out),
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(dash_attn.__file__).parents[1]), "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, env=environment, cwd=ROOT)
    (row,) = json.loads(out.read_text())["rows"]
    assert set(row["tokens_per_second"]) == {"none", "default", "detail"}
    assert set(row["overhead"]) == {"default", "detail"}
    in_turns = row["default_ledger_in_turns"]
    assert abs(in_turns["with_ms"] / in_turns["without_ms"] - 1 - in_turns["overhead"]) < 0.01
    assert row["ledger_bytes_per_step"]["detail"] > 3 * row["ledger_bytes_per_step"]["default"]
    assert row["weights_of_two_runs_equal"]
    assert row["ledger_changes_weights"] is False
    assert row["diff"]["agree"]
