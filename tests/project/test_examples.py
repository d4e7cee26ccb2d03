"""Examples train. Those with one changed line print the same hash of their weights in two fresh processes, the one for several
processes prints the same hashes for any number of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(FOLDER.glob("train_*.py"))
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


def test_any_number_of_processes_ends_with_the_same_weights() -> None:
    """And with the same tensors of attention. The controls, ordinary sums over processes, differ."""
    done = subprocess.run([sys.executable, str(FOLDER / "long_context.py")], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    heading, *table = done.stdout.split("\n\n")[0].splitlines()
    assert heading.split() == ["1", "rank", "2", "ranks", "4", "ranks"]
    hashes = {name: found.split() for name, found in (re.split(r"  +", line, maxsplit=1) for line in table)}
    controls = {name for name in hashes if "(control)" in name}
    assert len(controls) == 3
    assert {name for name, (*_, verdict) in hashes.items() if verdict == "differ"} == controls
    assert all(len(set(found)) == (3 if name in controls else 1) for name, (*found, _) in hashes.items())
    assert hashes["attention, context parallel"] == hashes["attention, one call on one process"]
