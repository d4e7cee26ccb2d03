"""Examples train. Those with one changed line print the same hash of their weights in two fresh processes, the one for several
processes prints the same hashes for any number of them, and the one that samples has the log-probabilities of its training forward."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from started import started

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(FOLDER.glob("train_*.py"))
SEED = "torch.manual_seed(0)"
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
IN_TURN = """
import runpy, sys
paths, sys.argv[1:] = sys.argv[1:], []
for path in paths:
    print("example", path, flush=True)
    runpy.run_path(path, run_name="__main__")
"""
Outcome = tuple[list[float], str]


def in_a_new_process(scripts: list[Path]) -> dict[str, Outcome]:
    """Losses and hash of each, one after another. One thread: with more, PyTorch's own layers are slower here and may sum in another
    order."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", IN_TURN, *map(str, scripts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return {script.stem: outcome(said) for script, said in zip(scripts, re.split("^example ", done.stdout, flags=re.M)[1:], strict=True)}


def outcome(said: str) -> Outcome:
    (weights,) = re.findall(r"^weights ([0-9a-f]{16})$", said, re.M)
    return [float(loss) for loss in re.findall(r"loss (\S+)", said)], weights


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcome]]:
    """Of two processes, those that are asked for. The second has them in another order, and a control: other weights at the start."""
    control = tmp_path_factory.mktemp("control") / "control.py"
    control.write_text(EXAMPLES[0].read_text().replace(SEED, "torch.manual_seed(1)"))
    asked = {item.name for item in request.session.items}
    scripts = [script for script in EXAMPLES if f"test_two_runs_end_with_the_same_weights[{script.stem}]" in asked]
    scripts = [script for script in scripts if HAS_TRANSFORMERS or script.stem != "train_hf"]
    return [in_a_new_process(scripts), in_a_new_process([*reversed(scripts), control])]


def test_the_examples_are_there() -> None:
    assert [path.name for path in EXAMPLES] == ["train_flash_attn.py", "train_hf.py", "train_sdpa.py"]


@pytest.mark.parametrize(
    "script", [EXAMPLES[0], *(pytest.param(script, marks=pytest.mark.exhaustive) for script in EXAMPLES[1:])], ids=lambda path: path.stem
)
def test_two_runs_end_with_the_same_weights(script: Path, runs: list[dict[str, Outcome]]) -> None:
    if script.stem == "train_hf" and not HAS_TRANSFORMERS:
        pytest.skip("needs transformers")
    source = script.read_text()
    assert source.count("the one changed line") == 1
    assert source.count(SEED) == 1
    first, second = (run[script.stem] for run in runs)
    losses, weights = first
    assert losses[-1] < losses[0]
    assert second == first
    if script == EXAMPLES[0]:
        assert weights != runs[1]["control"][1]


@pytest.mark.exhaustive
def test_any_number_of_processes_ends_with_the_same_weights() -> None:
    """And with the same tensors of attention. The controls, ordinary sums over processes, differ."""
    with started([sys.executable, str(FOLDER / "long_context.py")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        said, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    heading, *table = said.split("\n\n")[0].splitlines()
    assert heading.split() == ["1", "rank", "2", "ranks", "4", "ranks"]
    hashes = {name: found.split() for name, found in (re.split(r"  +", line, maxsplit=1) for line in table)}
    controls = {name for name in hashes if "(control)" in name}
    assert len(controls) == 3
    assert {name for name, (*_, verdict) in hashes.items() if verdict == "differ"} == controls
    assert all(len(set(found)) == (3 if name in controls else 1) for name, (*found, _) in hashes.items())
    assert hashes["attention, context parallel"] == hashes["attention, one call on one process"]


@pytest.mark.parametrize("script", [path for path in sorted(FOLDER.glob("*.py")) if path.stem != "train"], ids=lambda path: path.stem)
@pytest.mark.exhaustive
def test_every_example_has_help(script: Path) -> None:
    """Nothing is trained. That of train.py: tests/ledgers/test_train_example.py."""
    done = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    described = (ast.get_docstring(ast.parse(script.read_text())) or "").split()
    assert " ".join(described) in " ".join(done.stdout.split())


def rolled_out(*flags: str) -> tuple[list[int], list[float], str]:
    """How many log-probabilities differ, how far ratios are from 1, and the end."""
    command, on_cpu = [sys.executable, str(FOLDER / "rollout.py"), "--steps", "3", *flags], {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, env=on_cpu)
    assert done.returncode == 0, done.stderr
    steps = re.findall(r"^step .* (\d+) of 192 log-probabilities differ  \|ratio - 1\| <= (\S+)$", done.stdout, re.M)
    return [int(differ) for differ, _ in steps], [float(worst) for _, worst in steps], done.stdout.splitlines()[-1]


@pytest.mark.exhaustive
@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="needs transformers")
def test_sampler_and_trainer_agree() -> None:
    """In every log-probability, and so in two runs. Without invariance they do not."""
    first, again, without = rolled_out(), rolled_out(), rolled_out("--without")
    assert first[:2] == ([0, 0, 0], [0.0, 0.0, 0.0])
    assert again == first
    assert all(differ > 0 for differ in without[0][:1])
    assert max(without[1]) > 0
