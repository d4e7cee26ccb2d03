"""Every example trains, and prints the same hash of its weights in two fresh processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("train_*.py"))
SEED = "torch.manual_seed(0)"


def run(script: Path, source: str) -> tuple[list[float], str]:
    """Losses and hash. One thread: with more, PyTorch's own layers are slower here and may sum in another order."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, f"{script.name}: {done.stderr}"
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]
    return losses, re.findall(r"^weights ([0-9a-f]{16})$", done.stdout, re.M)[0]


def test_the_examples_are_there() -> None:
    assert [path.name for path in EXAMPLES] == ["train_flash_attn.py", "train_hf.py", "train_sdpa.py"]


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_two_runs_end_with_the_same_weights(script: Path) -> None:
    if script.stem == "train_hf":
        pytest.importorskip("transformers")
    source = script.read_text()
    assert source.count("the one changed line") == 1
    assert source.count(SEED) == 1
    losses, weights = run(script, source)
    assert losses[-1] < losses[0]
    assert run(script, source) == (losses, weights)
    if script == EXAMPLES[0]:  # the control: other weights at the start, another hash at the end
        assert run(script, source.replace(SEED, "torch.manual_seed(1)"))[1] != weights
