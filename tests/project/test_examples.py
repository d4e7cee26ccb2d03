"""Examples train. Those with one changed line print the same hash of their weights in two fresh processes, the one for several
processes prints the same hashes for any number of them, and the one that samples those of its training forward."""

from __future__ import annotations

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
for path in sys.argv[1:]:
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


@pytest.mark.exhaustive
def test_sampled_tokens_have_the_attention_of_training() -> None:
    """In every layer, given equal inputs. The controls differ: SDPA, and the rest of a model whose products are not pinned."""
    command, one_thread = (
        [sys.executable, str(FOLDER / "sample_and_train.py")],
        {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=one_thread)
    assert done.returncode == 0, done.stderr
    heading, *table = done.stdout.split("\n\n")[0].splitlines()
    assert heading.split() == ["sampled", "trained"]
    found = dict(re.split(r"  +", line, maxsplit=1) for line in table)
    hashes = {name: (one, other, verdict) for name, (one, other, verdict, *_) in ((name, text.split()) for name, text in found.items())}
    equal = {name for name, (one, other, verdict) in hashes.items() if verdict == "equal" and one == other}
    layers = {f"attention of layer {layer}, equal inputs" for layer in range(3)}
    assert equal == {*layers, "log-probabilities, products of 32 rows each"}
    controls = {f"SDPA of layer {layer}, equal inputs (control)" for layer in range(3)}
    assert set(hashes) - equal == {*controls, "log-probabilities, products as they come"}
    assert all(verdict == "differ" and one != other for name, (one, other, verdict) in hashes.items() if name not in equal)
    assert len({one for one, _, _ in hashes.values()}) == len(hashes), "each is of tensors of its own"
