"""The same cases in a process of their own: another address space, another hash seed, nothing cached in memory.

Run as `python -m dash_attn.verify.fresh FOLDER DEVICE`: reads FOLDER/cases.json, leaves the results of case i in FOLDER/i.pt.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from .bits import Results, attend
from .cases import Case, make_inputs


def fresh_results(cases: Sequence[Case], device: str) -> list[Results]:
    """What a new process computes for each case."""
    with TemporaryDirectory(prefix="dash-attn-verify-") as name:
        folder = Path(name)
        (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]), encoding="utf-8")
        command = [sys.executable, "-m", __name__, name, device]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": "random"})
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise ValueError(f"the fresh process failed with exit code {done.returncode}: {last}")
        return [Results(*torch.load(folder / f"{i}.pt", weights_only=True)) for i in range(len(cases))]


def _main(folder: Path, device: str) -> None:
    cases = [Case(**case) for case in json.loads((folder / "cases.json").read_text(encoding="utf-8"))]
    for i, case in enumerate(cases):
        torch.save(list(attend(make_inputs(case, device), case.read_mask())), folder / f"{i}.pt")


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2])
