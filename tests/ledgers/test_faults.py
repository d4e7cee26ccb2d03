"""Faults that are planted into a run: diff names step, module and direction of each. Runs without one agree."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dash_attn.cli.main import main
from tiny_gpt import TinyGpt, Training, flip_bit

DETAIL = {"detail": True, "keep": 4}


def diff(a: Path, b: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    status = main(["diff", str(a), str(b), "--json"])
    return status, json.loads(capsys.readouterr().out)


def compared(tmp_path: Path, capsys: pytest.CaptureFixture[str], one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The first difference of two trainings, which must differ."""
    Training(tmp_path / "a", **one).run()
    Training(tmp_path / "b", **other).run()
    status, found = diff(tmp_path / "a", tmp_path / "b", capsys)
    assert status == 1
    assert not found["agree"]
    return found


def where(found: dict[str, Any]) -> tuple[Any, ...]:
    first = found["first"]
    return first["step"], first["direction"], first["module"], first["inputs_agreed"]


@pytest.mark.parametrize("ledger", [{}, DETAIL], ids=["default", "detail"])
def test_runs_without_a_fault_agree(ledger: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        Training(tmp_path / name, ledger=ledger, model={"dropout": 0.1}).run()
    status, found = diff(tmp_path / "a", tmp_path / "b", capsys)
    assert (status, found["agree"], found["steps"], found["first"]) == (0, True, [0, 1, 2], None)
    assert found["tensors"] > (1000 if ledger else 300)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out.startswith("The runs agree: ")


def test_another_seed_is_seen_before_the_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = compared(tmp_path, capsys, {}, {"seed": 1})
    assert where(found)[:2] == (0, "before the forward")
    assert found["first"]["before_it"]
    assert found["first"]["phase"] == "weight"


@pytest.mark.exhaustive  # test_train_example.py has it in a copy of the example
def test_unordered_attention_in_a_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The forward has no order to get wrong; the backward has."""
    run = {"steps": 1, "length": 1024, "model": {"unordered_in": 3}, "ledger": DETAIL}
    found = compared(tmp_path, capsys, run, run)
    assert where(found) == (0, "backward", "layers.3.attention", True)
    assert found["first"]["tensor"] == {"module": "layers.3.attention.qkv", "role": "output", "name": "", "call": 0}
    assert found["first"]["differing"]["forward"]["differ"] == 0
    assert found["attention"] == []


def test_unordered_attention_without_detail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The layer is still named: gradients of later layers agree."""
    run = {"steps": 1, "length": 1024, "model": {"unordered_in": 3}}
    found = compared(tmp_path, capsys, run, run)
    assert where(found) == (0, "backward", "layers.3.attention.qkv", None)
    assert found["first"]["tensor"]["name"] == "weight"
    assert "docs/ledger.md" in found["first"]["why"]


def test_another_plan_of_attention_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = {"steps": 1, "length": 1024, "ledger": DETAIL}
    found = compared(tmp_path, capsys, run, {**run, "model": {"unordered_in": 3}})
    assert where(found)[1:3] == ("backward", "layers.3.attention")
    changed = {"name": "step 0, layers.3.attention: accumulation", "a": "ordered", "b": "unordered"}
    assert found["attention"] == [changed]


class Perturbed(torch.autograd.Function):
    """Stands for an operation whose backward adds in any order (index_add_ on a GPU): the last bit of one gradient is left to chance."""

    chance = 0

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        changed = gradient.clone()
        changed.view(-1).view(torch.int32)[7] ^= Perturbed.chance
        return changed


class UnorderedEmbedding(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, Perturbed.apply(self.weight))  # type: ignore[no-untyped-call]


def with_unordered_embedding(model: nn.Module) -> None:
    assert isinstance(model, TinyGpt)
    other = UnorderedEmbedding(*model.embedding.weight.shape)
    other.weight = model.embedding.weight
    model.embedding = other


@pytest.mark.parametrize("ledger", [{}, pytest.param(DETAIL, marks=pytest.mark.exhaustive)], ids=["default", "detail"])
def test_a_backward_that_adds_in_any_order(
    ledger: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def chance(step: int, model: nn.Module) -> None:
        monkeypatch.setattr(Perturbed, "chance", int(step == 1))

    run = {"changed_model": with_unordered_embedding, "ledger": ledger}
    found = compared(tmp_path, capsys, run, {**run, "before_step": chance})
    assert where(found) == (1, "backward", "embedding", True if ledger else None)
    assert found["first"]["phase"] == "gradient"
    assert found["first"]["differing"]["gradient"]["differ"] == 1


class PerturbedLinear(nn.Linear):
    """Its forward is right, the gradient of its input is not."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Perturbed.apply(x))  # type: ignore[no-untyped-call]


def test_a_backward_inside_of_a_module(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def perturb(model: nn.Module) -> None:
        assert isinstance(model, TinyGpt)
        model.layers[1].mlp[2].__class__ = PerturbedLinear

    def chance(step: int, model: nn.Module) -> None:
        monkeypatch.setattr(Perturbed, "chance", 1 << 10 if step == 2 else 0)

    run = {"changed_model": perturb, "ledger": DETAIL}
    found = compared(tmp_path, capsys, run, {**run, "before_step": chance})
    assert where(found) == (2, "backward", "layers.1.mlp.2", True)
    assert found["first"]["tensor"]["module"] == "layers.1.mlp.1"  # the gradient of its output


@pytest.mark.exhaustive  # test_train_example.py has it in a copy of the example
def test_another_seed_in_one_data_worker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Worker 1 makes the batches of odd steps."""
    found = compared(tmp_path, capsys, {"ledger": {"detail": range(1, 2), "keep": 200}}, {"worker_seeds": (0, 5), "ledger": DETAIL})
    assert where(found)[:3] == (1, "before the forward", None)
    assert found["first"]["tensor"]["name"] == "batch['tokens']"
    element = found["first"]["element"]
    assert element["index"][0] == 0
    assert element["a"] != element["b"]


def flip_at_seven(step: int, model: nn.Module, bit: int = 12) -> None:
    if step == 7:
        assert isinstance(model, TinyGpt)
        flip_bit(model.layers[2].mlp[0].weight, bit=bit)


@pytest.mark.exhaustive  # test_train_example.py has it in a copy of the example
def test_one_flipped_bit_of_a_weight(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = {"steps": 9, "ledger": {"detail": range(6, 9), "keep": 4}}
    found = compared(tmp_path, capsys, run, {**run, "before_step": flip_at_seven})
    assert where(found) == (7, "forward", "layers.2.mlp.0", True)
    assert found["first"]["tensor"]["role"] == "parameter"
    element = found["first"]["element"]
    assert element["index"] == [0, 3]
    bits = [int(element[run].split("0x")[1].rstrip(")"), 16) for run in "ab"]
    assert bits[0] ^ bits[1] == 1 << 12


@pytest.mark.parametrize(("bit", "direction"), [(27, "forward"), (12, "forward or backward")])
def test_a_flipped_bit_without_detail(bit: int, direction: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Step and direction are known, the module is not: the reader is told how to see it. The loss is rounded, so it may still agree."""
    found = compared(tmp_path, capsys, {"steps": 9}, {"steps": 9, "before_step": partial(flip_at_seven, bit=bit)})
    assert where(found) == (7, direction, None, None)
    assert "record this step again" in found["first"]["why"]
    assert found["steps_that_differ"] == [7, 8]


def test_an_update_that_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A gradient is changed after the backward, in a step without detail: the weights of that module are next."""

    def change(step: int, model: nn.Module) -> None:
        if step == 1:
            assert isinstance(model, TinyGpt)
            model.head.weight.data[0, 0] += 1e-3

    found = compared(tmp_path, capsys, {}, {"after_backward": change})
    assert where(found) == (1, "update", "head", True)


@pytest.mark.exhaustive  # test_train_example.py has it in a copy of the example
@pytest.mark.parametrize("restored", [True, False])
def test_a_resumed_run(restored: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its generators it agrees with the run that went on; without, the difference is there before its first step."""
    dropout = {"model": {"dropout": 0.1}}
    Training(tmp_path / "a", steps=5, **dropout).run()
    checkpoint = Training(tmp_path / "b", steps=3, **dropout).run()
    Training(tmp_path / "b", steps=2, first_step=3, checkpoint=checkpoint, seed=9, restores_generators=restored, **dropout).run()
    status, found = diff(tmp_path / "a", tmp_path / "b", capsys)
    assert found["steps"] == [0, 1, 2, 3, 4]
    if restored:
        assert (status, found["agree"]) == (0, True)
        return
    assert where(found)[:2] == (3, "before the forward")
    assert found["first"]["before_it"]
    assert found["first"]["tensor"]["name"] == "torch cpu"
    assert {"rng"} == {phase for phase, count in found["first"]["differing"].items() if count["differ"]}
    assert "B resumed at step 3 from another state than it had after step 2: rng torch cpu" in "\n".join(found["notes"])
    assert found["steps_that_differ"] == [3, 4]


def test_a_generator_that_nobody_draws_from_is_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without dropout, the lost state has no consequence. Control: with it, above."""
    Training(tmp_path / "a", steps=3).run()
    checkpoint = Training(tmp_path / "b", steps=2).run()
    Training(tmp_path / "b", steps=1, first_step=2, checkpoint=checkpoint, seed=9, restores_generators=False).run()
    status, found = diff(tmp_path / "a", tmp_path / "b", capsys)
    assert (status, found["agree"]) == (0, True)
    assert "the generator torch cpu has another state since before step 2, which changed nothing" in found["notes"]


@pytest.mark.exhaustive  # test_train_example.py has it in a copy of the example
def test_control_dropout_of_an_unseeded_generator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def forget_the_seed(step: int, model: nn.Module) -> None:
        if step == 1:
            torch.seed()

    run = {"model": {"dropout": 0.5}, "ledger": DETAIL}
    found = compared(tmp_path, capsys, run, {**run, "before_step": forget_the_seed})
    assert where(found) == (1, "forward", "layers.0.mlp.3", True)
    assert found["first"]["tensor"]["role"] == "output"
    assert found["first"]["differing"]["rng"]["differ"] == 1


def test_code_between_modules_is_the_module_that_calls_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def with_noise(model: nn.Module) -> None:
        assert isinstance(model, TinyGpt)
        block = model.layers[1]
        block.forward = lambda x: (x + block.attention(block.norm1(x)) * (1 + 2**-20)) + block.mlp(block.norm2(x))  # type: ignore[method-assign]

    run = {"ledger": DETAIL}
    found = compared(tmp_path, capsys, run, {**run, "changed_model": with_noise})
    assert where(found) == (0, "forward", "layers.1", True)


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = {"steps": 8, "ledger": {"detail": range(7, 8), "keep": 4}}
    compared(tmp_path, capsys, run, {**run, "before_step": flip_at_seven})
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    shown = capsys.readouterr().out
    for text in (
        "first in step 7",
        "layers.2.mlp.0",
        "its inputs agreed    yes",
        "parameter weight of layers.2.mlp.0",
        "first element        [0, 3]",
    ):
        assert text in shown
