"""The same cases in processes of their own: another address space, another hash seed, nothing cached in memory.

The first of them compiles every kernel anew, into an empty cache; the second finds that cache.

Run as `python -m dash_attn.tools.verify.fresh FOLDER DEVICE BACKEND`: reads FOLDER/cases.json, leaves the results of case i in FOLDER/i.pt.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ...attention.functions import flash_attn_func
from .cases import Case, Results, attend, make_inputs

PROCESSES = ("a fresh process with a cold cache", "a fresh process with a warm cache")


def fresh_results(cases: Sequence[Case], device: str, backend: str = "auto") -> dict[str, list[Results]]:
    """What new processes compute for each case, by what is special about them."""
    with TemporaryDirectory(prefix="dash-attn-verify-") as name:
        folder = Path(name)
        (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]), encoding="utf-8")
        (folder / "cache").mkdir()
        return {process: _one_process(folder, device, backend, len(cases)) for process in PROCESSES}


def _one_process(folder: Path, device: str, backend: str, cases: int) -> list[Results]:
    command = [sys.executable, "-m", __name__, str(folder), device, backend]
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "random",
        "DASH_ATTN_CACHE": str(folder / "cache"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ValueError(f"the fresh process failed with exit code {done.returncode}: {last}")
    return [Results(*torch.load(folder / f"{i}.pt", weights_only=True)) for i in range(cases)]


def _main(folder: Path, device: str, backend: str) -> None:
    cases = [Case(**case) for case in json.loads((folder / "cases.json").read_text(encoding="utf-8"))]
    for i, case in enumerate(cases):
        results = attend(make_inputs(case, device), case.read_mask(), case.schedule, partial(flash_attn_func, backend=backend))
        torch.save(list(results), folder / f"{i}.pt")


if __name__ == "__main__":
    _main(Path(sys.argv[1]), *sys.argv[2:])
