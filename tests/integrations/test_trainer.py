"""transformers' Trainer with full_determinism=True and attn_implementation="dash_attn": the same weights in every run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from dash_attn.integrations import huggingface  # noqa: E402
from dense import same_bits  # noqa: E402
from model_sizes import SMALL  # noqa: E402
from process_settings import restored_settings  # noqa: E402

SIZES = {**SMALL, "use_cache": False}


@pytest.fixture(autouse=True)
def _settings_restored() -> Iterator[None]:
    with restored_settings():
        yield


def samples(equal_lengths: bool) -> list[dict[str, list[int]]]:
    source = torch.Generator().manual_seed(0)
    lengths = [90] * 8 if equal_lengths else [70, 1, 79, 130, 20, 64, 65, 3]
    rows = [torch.randint(64, (length,), generator=source).tolist() for length in lengths]
    return [{"input_ids": row, "labels": row} for row in rows]


def train(folder: Path, collator: Any, equal_lengths: bool, attention: str = "dash_attn", seed: int = 1) -> list[Tensor]:
    """The weights after four steps."""
    huggingface.enable()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        full_determinism=True,
        seed=seed,
        max_steps=4,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    transformers.set_seed(seed)
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=40, attn_implementation=attention))
    trainer = transformers.Trainer(model, arguments, train_dataset=samples(equal_lengths), data_collator=collator)
    trainer.train()
    assert torch.are_deterministic_algorithms_enabled()
    return [p.detach().clone() for p in model.parameters()]


def padded(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Rows of one batch, filled up on the right."""
    longest = max(len(row["input_ids"]) for row in rows)
    filled = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    with_masks = [row | {"attention_mask": [1] * len(row["input_ids"])} for row in rows]
    return {key: torch.tensor([row[key] + [fill] * (longest - len(row[key])) for row in with_masks]) for key, fill in filled.items()}


COLLATORS = {
    "batches": (transformers.default_data_collator, True),
    "padded": (padded, False),
    "packed by positions": (transformers.DataCollatorWithFlattening(), False),
    "packed by lengths": (transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True), False),
}


@pytest.mark.parametrize("name", COLLATORS)
def test_two_runs_have_the_same_weights(name: str, tmp_path: Path) -> None:
    collator, equal_lengths = COLLATORS[name]
    first, second = (train(tmp_path, collator, equal_lengths) for _ in range(2))
    assert all(same_bits(one, other) for one, other in zip(first, second, strict=True))
    other_seed = train(tmp_path, collator, equal_lengths, seed=2)
    assert not all(same_bits(one, other) for one, other in zip(first, other_seed, strict=True))


def test_packed_by_positions_and_by_lengths_are_the_same(tmp_path: Path) -> None:
    runs = [train(tmp_path, *COLLATORS[name]) for name in ("packed by positions", "packed by lengths")]
    assert all(same_bits(one, other) for one, other in zip(*runs, strict=True))


@pytest.mark.parametrize("name", ["batches", "padded", "packed by positions"])
def test_weights_are_those_of_eager(name: str, tmp_path: Path) -> None:
    ours, eager = (train(tmp_path, *COLLATORS[name], attention=kind) for kind in ("dash_attn", "eager"))
    for mine, theirs in zip(ours, eager, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
