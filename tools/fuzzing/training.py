"""examples/train.py twice: once in one go, once killed and resumed. `dash-attn diff` of the two ledgers, and hashes of the weights."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train.py"
TINY = {"layers": 1, "width": 16, "heads": 2, "length": 40, "micro_batches": 2, "size": 1, "sequences": 40, "vocabulary": 16}
KILLS = 2


def command(out: Path, steps: int, device: str, *more: str) -> list[str]:
    settings = {**TINY, "steps": steps, "device": device, "out": out, "checkpoint_every": max(1, steps // 20)}
    return [sys.executable, str(EXAMPLE), *(f"--{name.replace('_', '-')}={value}" for name, value in settings.items()), *more]


def lines_of(words: list[str], until: str = "") -> Iterator[str]:
    """What it prints. Killed when a line begins so; must end well otherwise."""
    paths = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield line.rstrip()
            if until and line.startswith(until):
                process.kill()
                return
    if process.returncode:
        raise RuntimeError(f"{EXAMPLE.name} ended with exit code {process.returncode}")


def weights(lines: Iterator[str]) -> str:
    (found,) = (match[1] for line in lines if (match := re.fullmatch(r"weights (\w+)", line)))
    return found


def twice(steps: int, device: str, seed: int = 0) -> dict[str, Any]:
    """What is written down: where it was killed, the hashes, and what diff says."""
    random = Random(seed)
    killed = sorted(random.sample(range(steps // 10, steps - steps // 10), KILLS))
    with TemporaryDirectory(prefix="dash-attn-train-") as name:
        whole, parts = Path(name) / "whole", Path(name) / "parts"
        in_one_go = weights(lines_of(command(whole, steps, device)))
        for number, step in enumerate(killed):
            resumed = ["--resume"] if number else []
            for _ in lines_of(command(parts, steps, device, *resumed), until=f"step {step:3} "):
                pass
        interrupted = weights(lines_of(command(parts, steps, device, "--resume")))
        said = diff(whole, parts)
    kept = {name: said[name] for name in ("verdict", "exit_code", "tensors")}
    return {"steps": len(said["steps"]), "killed_at": killed, "weights": [in_one_go, interrupted], **kept}


def diff(one: Path, other: Path) -> dict[str, Any]:
    """As the command says it."""
    words = [sys.executable, "-m", "dash_attn", "diff", str(one), str(other), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, check=False)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def agrees(found: dict[str, Any], steps: int) -> bool:
    return found["exit_code"] == 0 and found["steps"] == steps and len(set(found["weights"])) == 1
