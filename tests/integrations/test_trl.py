"""TRL's trainers with attn_implementation="dash_attn": two runs end with the same weights, which are those of eager within rounding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl", reason="needs TRL (in the dev extra, for Python 3.11 and later)")
datasets = pytest.importorskip("datasets")

from dash_attn import invariance  # noqa: E402
from dash_attn.integrations import huggingface  # noqa: E402
from dense import same_bits  # noqa: E402
from process_settings import restored_settings  # noqa: E402
from tiny_language import END, PAD, VOCABULARY, texts, tokenizer  # noqa: E402

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 40,
    "pad_token_id": PAD,
    "eos_token_id": END,
    "bos_token_id": END,
}
LENGTHS = [70, 5, 79, 130, 20, 64, 65, 3]


@pytest.fixture(autouse=True)
def _settings_restored() -> Iterator[None]:
    datasets.disable_progress_bars()
    with restored_settings():
        yield


def settings(folder: Path, seed: int) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "full_determinism": True,
        "seed": seed,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def model(folder: Path, attention: str, seed: int, **sizes: int) -> nn.Module:
    """From a file, because a trainer that needs a second copy reads it from there."""
    huggingface.enable()
    transformers.set_seed(seed)
    transformers.MistralForCausalLM(transformers.MistralConfig(**{**SIZES, **sizes})).save_pretrained(folder / "model")
    return transformers.MistralForCausalLM.from_pretrained(folder / "model", attn_implementation=attention)


def weights(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def same_weights(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(same_bits(a, b) for a, b in zip(one, other, strict=True))


def assert_near(ours: list[Tensor], eager: list[Tensor]) -> None:
    for mine, theirs in zip(ours, eager, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


ROWS = {
    "packed": {"packing": True, "max_length": 128},
    "cut into rows": {"packing": True, "packing_strategy": "wrapped", "max_length": 128},
    "padding-free": {"padding_free": True, "max_length": None},
    "padded": {"max_length": 128},
}


def tune(folder: Path, rows: str, attention: str = "dash_attn", seed: int = 1) -> list[Tensor]:
    """The weights after four steps of supervised fine-tuning."""
    net = model(folder, attention, seed)
    arguments = trl.SFTConfig(**settings(folder, seed), **ROWS[rows], max_steps=4, per_device_train_batch_size=2)
    data = datasets.Dataset.from_dict({"text": texts(LENGTHS)})
    trl.SFTTrainer(net, arguments, train_dataset=data, processing_class=tokenizer()).train()
    return weights(net)


@pytest.mark.parametrize("rows", [pytest.param(rows, marks=() if rows == "packed" else pytest.mark.exhaustive) for rows in ROWS])
def test_supervised_fine_tuning(rows: str, tmp_path: Path) -> None:
    first, second = (tune(tmp_path, rows) for _ in range(2))
    assert same_weights(first, second)
    assert not same_weights(first, tune(tmp_path, rows, seed=2))
    assert_near(first, tune(tmp_path, rows, attention="eager"))


def reinforce(
    folder: Path, attention: str = "dash_attn", seed: int = 1, cache: str | None = None
) -> tuple[list[Tensor], list[list[list[int]]]]:
    """The weights after three steps of GRPO, and what the model wrote on the way."""
    net = model(folder, attention, seed)
    written: list[list[list[int]]] = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        written.append([list(ids) for ids in completion_ids])
        return [float(sum(ids) % 2) for ids in completion_ids]  # differs between completions, so there is something to learn

    sizes = {"num_generations": 4, "per_device_train_batch_size": 4, "generation_batch_size": 8, "max_completion_length": 12}
    arguments = trl.GRPOConfig(**settings(folder, seed), **sizes, max_steps=3, beta=0.1, cache_implementation=cache)
    data = datasets.Dataset.from_dict({"prompt": texts(LENGTHS)})
    trl.GRPOTrainer(net, reward, arguments, train_dataset=data, processing_class=tokenizer()).train()
    return weights(net), written


@pytest.mark.exhaustive
def test_grpo(tmp_path: Path) -> None:
    """It generates in batches with a cache and padding on the left, and learns with padding on both sides."""
    (first, wrote), (second, wrote_again) = (reinforce(tmp_path) for _ in range(2))
    assert wrote == wrote_again
    assert same_weights(first, second)
    assert len({len(ids) for batch in wrote for ids in batch}) > 1  # so there is padding on the right
    eager, eager_wrote = reinforce(tmp_path, attention="eager")
    assert wrote == eager_wrote
    assert_near(first, eager)
    other, other_wrote = reinforce(tmp_path, seed=2)
    assert wrote != other_wrote
    assert not same_weights(first, other)


@pytest.mark.exhaustive
def test_grpo_with_a_static_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same texts as with a cache that grows, and the same weights."""
    made: list[Any] = []
    original = transformers.StaticCache.__init__

    def noting(cache: Any, *args: Any, **kwargs: Any) -> None:
        made.append(cache)
        original(cache, *args, **kwargs)

    monkeypatch.setattr(transformers.StaticCache, "__init__", noting)
    growing, wrote = reinforce(tmp_path)
    assert not made
    static, wrote_static = reinforce(tmp_path, cache="static")
    assert made
    assert wrote == wrote_static
    assert same_weights(growing, static)


def first_update_of_grpo(folder: Path, lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Log-probabilities by TRL's formula: of the logits that `generate` chose a token with, of the trainer before the first update, and, of
    a micro-batch, those in it and those before it."""
    chunked = pytest.importorskip("trl.kernels", reason="needs a TRL that has a fused head").ChunkedLogProbFunction
    net, told = model(folder, "dash_attn", seed=1, hidden_size=256, intermediate_size=601), dict[str, Tensor]()
    for parameter in net.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)  # else tokens are all alike, and rounding hides differences
    generate, score, loss = net.generate, trl.GRPOTrainer._get_per_token_logps_and_entropies, trl.GRPOTrainer._compute_loss

    def generated(*args: Any, **named: Any) -> Tensor:
        found = generate(*args, **named, return_dict_in_generate=True, output_logits=True)
        tokens = found.sequences[:, -len(found.logits) :]
        logits = torch.stack(found.logits, 1).flatten(0, 1)
        scores = chunked.apply(logits, torch.eye(VOCABULARY), None, tokens.flatten(), 1.0, 32768, None, 1.0, ())[0]
        told["sampler"] = scores.view(tokens.shape)
        return found.sequences

    def scored(*args: Any, **named: Any) -> Any:
        found = score(*args, **named)
        told["in the update" if torch.is_grad_enabled() else "trainer"] = found[0].detach().clone()
        return found

    def with_loss(trainer: Any, net: Any, inputs: Any) -> Any:
        told["before it"] = inputs["old_per_token_logps"]
        return loss(trainer, net, inputs)

    monkeypatch.setattr(net, "generate", generated)
    monkeypatch.setattr(trl.GRPOTrainer, "_get_per_token_logps_and_entropies", scored)
    monkeypatch.setattr(trl.GRPOTrainer, "_compute_loss", with_loss)
    sizes = {"num_generations": 3, "per_device_train_batch_size": 3, "generation_batch_size": 6, "max_completion_length": 12}
    data = datasets.Dataset.from_dict({"prompt": texts(lengths)})
    arguments = trl.GRPOConfig(**settings(folder, 1), **sizes, max_steps=1)
    trl.GRPOTrainer(net, lengths_as_rewards, arguments, train_dataset=data, processing_class=tokenizer()).train()
    return told


def lengths_as_rewards(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def test_grpo_has_the_log_probabilities_of_its_sampler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts of one length: TRL's trainer counts the places of others from their padding on, `generate` from their first token on.
    The control: outside of `invariance.enable()` one of both differs."""
    for inside in (True, False):
        with monkeypatch.context() as patches, invariance.enable() if inside else nullcontext():
            told = first_update_of_grpo(tmp_path, [29] * 6, patches)
        tokens = told["trainer"] != 0  # behind the end of a completion it is 0
        ratio = (told["in the update"] - told["before it"]).exp()
        assert tokens.sum() > 30
        sampled = same_bits(told["sampler"][tokens], told["trainer"][tokens])
        assert (sampled and bool((ratio == 1).all())) == inside


@pytest.mark.exhaustive
def test_the_ratio_of_padded_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with invariance.enable():
        told = first_update_of_grpo(tmp_path, LENGTHS, monkeypatch)
    assert bool((told["in the update"] == told["before it"]).all())
