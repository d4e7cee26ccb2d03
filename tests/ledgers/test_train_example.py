"""examples/train.py: the same weights in two runs and after a kill. Faults in copies of it: diff names step, module and direction."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from dash_attn.ledgers import Comparison, compare_runs
from started import started
from train_example import EXAMPLE, SMALL, copy_with, module_of, train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run without a fault, with detail from step 6 on; and the hash of its weights."""
    folder = tmp_path_factory.mktemp("example") / "run"
    return folder, train(folder, detail_from=6)


def killed_after_step_4(out: Path, folder: Path) -> None:
    """The copy waits there, so that a busy machine kills it in time."""
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in {**SMALL, "checkpoint_every": 3, "out": out}.items()]
    command = [sys.executable, str(copy_with("waits after step 4", folder)), *settings]
    with started(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "2"}) as process:
        assert process.stdout is not None
        said = list(takewhile(lambda line: not line.startswith("step   4 "), process.stdout))
    assert process.returncode == -signal.SIGKILL, said


def test_a_run_that_was_killed_ends_with_the_same_weights(
    run: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its first part is also a second run, in a new process with another number of threads set."""
    out = tmp_path / "out"
    killed_after_step_4(out, tmp_path)
    assert train(out, resume=True) == run[1]
    steps = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert steps[0] == "3"  # that after the checkpoint
    found = compare_runs(run[0], out, partial=True)  # without detail
    assert found.agree
    assert found.steps == tuple(range(9))
    assert not any("resumed at step" in note for note in found.notes)


def test_a_run_that_ended_before_its_first_checkpoint_starts_again(run: tuple[Path, str], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "b", copy_with("ends after step 4", tmp_path), checkpoint_every=100)
    assert train(tmp_path / "b", resume=True) == run[1]
    assert compare_runs(run[0], tmp_path / "b", partial=True).agree


def test_a_folder_that_has_a_run_is_refused_with_the_way_on(run: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    module = module_of(EXAMPLE)
    with pytest.raises(SystemExit, match="2"):
        module.main(["--out", str(run[0])])
    assert f"error: there is a run in {run[0]}: continue it with --resume, or name another folder with --out" in capsys.readouterr().err
    assert module.config_from(["--out", str(run[0]), "--resume"]).resume


def test_no_step_is_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        module_of(EXAMPLE).config_from(["--steps", "-1"])
    assert "error: --steps must be at least 1; got -1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        module_of(EXAMPLE).config_from(["--out", __file__])
    assert f"error: --out must be a folder; {__file__} is a file" in capsys.readouterr().err


def test_its_help_explains_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        module_of(EXAMPLE).main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--micro-batches MICRO_BATCHES per step, on all processes together (default: 4)" in shown


def test_a_run_resumes_with_its_settings(run: tuple[Path, str]) -> None:
    with pytest.raises(ValueError, match=r"a run resumes with the settings it had, .* changed \(before, now\): {'seed': \(0, 1\)}"):
        train(run[0], resume=True, seed=1)


def test_the_losses_fall(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And every batch of another seed is another one."""
    train(tmp_path, seed=3, dropout=0.0)
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert losses[-1] < losses[0]


def twice(fault: str, tmp_path: Path, **settings: Any) -> Comparison:
    """Two runs of one copy: what is left to chance parts them."""
    path = copy_with(fault, tmp_path)
    for name in "ab":
        train(tmp_path / name, path, **settings)
    return compare_runs(tmp_path / "a", tmp_path / "b")


def beside(run: tuple[Path, str], fault: str, tmp_path: Path, **settings: Any) -> Comparison:
    train(tmp_path / "b", copy_with(fault, tmp_path), **settings)
    return compare_runs(run[0], tmp_path / "b")


def where(found: Comparison) -> tuple[Any, ...]:
    assert found.first is not None
    judged = found.first.culprit
    return found.first.step, judged.direction, judged.module, judged.inputs_agreed


def test_unordered_attention_in_layer_3(tmp_path: Path) -> None:
    """Eight KV tiles: with fewer, two runs may add in one order by chance. In float32: rounding dQ to 16 bits hides most of it."""
    found = twice("unordered attention in layer 3", tmp_path, steps=1, micro_batches=1, length=1024, detail_from=0, bf16=False)
    assert where(found) == (0, "backward", "layers.3.attention", True)


def test_index_add_without_determinism(tmp_path: Path) -> None:
    found = twice("index_add_ without determinism", tmp_path, steps=1, detail_from=0)
    assert where(found) == (0, "backward", "tokens", True)
    assert found.first is not None
    assert found.first.differing["gradient"][0] == 1


def test_another_seed_in_one_worker(run: tuple[Path, str], tmp_path: Path) -> None:
    """The second worker makes the second micro-batch of every step. Control: with two workers and one seed, nothing changes."""
    train(tmp_path / "control", workers=2, steps=1, detail_from=0)
    found = beside(run, "another seed in one worker", tmp_path, workers=2, steps=1)
    assert where(found)[:3] == (0, "before the forward", None)
    assert found.first is not None
    assert found.first.pair.entry.tensor == "batch[1]"
    assert compare_runs(run[0], tmp_path / "control", partial=True).agree


def test_a_bit_that_flips_at_step_7(run: tuple[Path, str], tmp_path: Path) -> None:
    found = beside(run, "a flipped bit at step 7", tmp_path, detail_from=6)
    assert where(found) == (7, "forward", "layers.2.mlp.0", True)
    assert found.first is not None
    assert found.first.pair.element is not None
    assert found.first.pair.element.index == (0, 3)
    assert found.steps_that_differ == (7, 8)


def test_a_resumed_run_that_lost_its_generators(run: tuple[Path, str], tmp_path: Path) -> None:
    """Control: with them, above."""
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "b", copy_with("ends after step 4", tmp_path), checkpoint_every=3)
    found = beside(run, "lost generators", tmp_path, resume=True)
    assert where(found)[:2] == (3, "before the forward")
    assert found.first is not None
    assert (found.first.pair.entry.phase, found.first.pair.entry.tensor) == ("rng", "torch cpu")
    assert found.steps_that_differ == tuple(range(3, 9))


def test_control_unseeded_dropout(tmp_path: Path) -> None:
    found = twice("unseeded dropout", tmp_path, steps=1, detail_from=0)
    assert where(found) == (0, "forward", "layers.0.dropout", True)


@pytest.mark.exhaustive
def test_a_compiled_run(tmp_path: Path) -> None:
    bits = [train(tmp_path / name, compile=True, steps=3) for name in "ab"]
    assert bits[0] == bits[1]
    assert compare_runs(tmp_path / "a", tmp_path / "b").agree
