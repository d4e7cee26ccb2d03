"""What `dash-attn diff` names: hyper-parameters, a lost state of the optimizer, generators only where they matter."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dash_attn
from dash_attn.ledgers import compare_runs
from small_runs import AGREE, run, said


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps. Not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run(folder)
    return folder


def changed(name: str, value: Any) -> Callable[[int, Any, Any], None]:
    def change(step: int, model: Any, optimizer: Any) -> None:
        if step == 2:
            optimizer.param_groups[0][name] = value

    return change


@pytest.mark.parametrize(("name", "value"), [("lr", 1.0000001e-3), ("weight_decay", 0.1), ("betas", (0.9, 0.99))])
def test_a_hyper_parameter_is_named_not_a_module(name: str, value: Any, whole: Path, tmp_path: Path) -> None:
    run(tmp_path, before_step=changed(name, value))
    first = compare_runs(whole, tmp_path).first
    assert first is not None
    assert (first.step, first.before_it, first.culprit.direction, first.culprit.module) == (2, False, "update", None)
    assert first.culprit.why == f"hyper-parameters of the optimizer differ: group 0 {name}"
    assert first.culprit.inputs_agreed
    assert first.pair.element is not None


def lost(model: Any) -> Any:
    return model[0], torch.optim.AdamW(model[0].parameters())


def emptied(model: Any) -> Any:
    """Of the right shapes, with nothing in it."""
    layer, optimizer = lost(model)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    settings = optimizer.param_groups[0]
    settings["lr"], kept = 0.0, settings["lr"]
    optimizer.step()
    settings["lr"] = kept
    return layer, optimizer


@pytest.mark.parametrize(("change", "tensor"), [(lost, "of states"), (emptied, "of steps")])
def test_a_lost_state_of_the_optimizer_is_named_before_the_first_step(change: Any, tensor: str, whole: Path, tmp_path: Path) -> None:
    """Between two steps at which all of it is recorded."""
    run(tmp_path, 2, first=2, model=change(run(tmp_path, 2)))
    found = compare_runs(whole, tmp_path)
    assert found.first is not None
    assert (found.first.step, found.first.before_it, found.first.pair.entry.tensor) == (2, True, tensor)
    assert "the optimizer has lost its state" in found.first.culprit.why
    assert any(f"B resumed at step 2 from another state than it had after step 1: optimizer count {tensor}" in note for note in found.notes)


def test_a_learning_rate_that_a_schedule_changed_is_no_lost_state(tmp_path: Path) -> None:
    """A checkpoint has the learning rate of the next step, the record of a step its own."""

    def warm_up(step: int, model: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = 1e-3 * (step + 1)

    run(tmp_path / "a", before_step=warm_up)
    model = run(tmp_path / "b", 2, before_step=warm_up)
    warm_up(2, *model)
    run(tmp_path / "b", 2, first=2, model=model, before_step=warm_up)
    assert said(tmp_path / "a", tmp_path / "b")[0] == AGREE


def test_a_generator_that_changes_nothing_is_a_note(tmp_path: Path) -> None:
    """Somebody draws from it, in both runs: a logger, a retry. What is behind it is the verdict."""

    def draw(step: int, model: Any, optimizer: Any) -> None:
        random.random()

    def draw_and_change(step: int, model: Any, optimizer: Any) -> None:
        random.random()
        model.weight.data += step == 3

    def draw_and_change_a_gradient(step: int, model: Any, optimizer: Any) -> None:
        random.random()
        if step == 0:
            model.bias.register_hook(lambda gradient: gradient + 1)

    for name, before_step in (("a", draw), ("b", draw), ("weight", draw_and_change), ("gradient", draw_and_change_a_gradient)):
        random.seed(name)
        run(tmp_path / name, before_step=before_step)
    code, _, printed = said(tmp_path / "a", tmp_path / "b")
    assert code == AGREE
    assert "note: the generator python has another state since before step 0, which changed nothing" in printed
    for name, step, phase in (("weight", 3, "loss"), ("gradient", 0, "gradient")):  # in step 0 the loss agrees: nothing was drawn for it
        found = compare_runs(tmp_path / "a", tmp_path / name)
        assert found.first is not None
        assert (found.first.step, found.first.before_it, found.first.pair.entry.phase) == (step, False, phase)
        assert "the generator python has another state since before step 0" in found.notes


def test_a_generator_that_parts_the_runs_is_the_verdict(tmp_path: Path) -> None:
    """The control of the one above: another batch comes from it, in the step after it differed first."""

    def noise(step: int, model: Any, optimizer: Any) -> None:
        model.bias.data += torch.rand(4)

    def more_noise(step: int, model: Any, optimizer: Any) -> None:
        torch.rand(int(step == 2))
        noise(step, model, optimizer)

    run(tmp_path / "a", before_step=noise)
    run(tmp_path / "b", before_step=more_noise)
    model = run(tmp_path / "c", 2, before_step=noise)
    torch.manual_seed(7)
    run(tmp_path / "c", 2, first=2, model=model, before_step=noise)
    drawn, lost_state = (compare_runs(tmp_path / "a", tmp_path / other).first for other in "bc")
    assert drawn is not None
    assert (drawn.step, drawn.pair.entry.phase) == (2, "loss")  # it agreed until then
    assert lost_state is not None
    assert (lost_state.step, lost_state.before_it, lost_state.pair.entry.tensor) == (2, True, "torch cpu")


def test_settings_that_one_run_alone_has_are_a_note(whole: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4)
    groups: list[Any] = [{"params": [layer.weight]}, {"params": [layer.bias], "weight_decay": 0.5}]
    run(tmp_path, model=(layer, torch.optim.AdamW(groups)))
    _, first, printed = said(whole, tmp_path)
    assert "first in step 0" in first
    assert "note: settings of the optimizer that B alone has: " in printed
    assert "group 1 weight_decay" in printed


def test_a_generator_is_not_blamed_where_gradients_agree(tmp_path: Path) -> None:
    """Without a loss and without a watched model; the step before is the first that shows the generator."""
    for name, rate in (("a", 1e-3), ("b", 0.1)):
        random.seed(name)
        torch.manual_seed(0)
        layer = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(layer.parameters())
        with dash_attn.ledger(tmp_path / name) as ledger:
            for step in range(3):
                random.random()
                optimizer.param_groups[0]["lr"] = rate if step == 1 else 1e-3
                optimizer.zero_grad()
                layer(torch.full((2, 4), float(step))).square().mean().backward()
                optimizer.step()
                ledger.step(layer, optimizer)
    first = compare_runs(tmp_path / "a", tmp_path / "b").first
    assert first is not None
    assert (first.step, first.culprit.why) == (1, "hyper-parameters of the optimizer differ: group 0 lr")
