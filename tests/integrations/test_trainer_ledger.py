"""transformers' Trainer with a ledger: two runs agree, a resumed one too, and another seed is named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from dash_attn.integrations import huggingface  # noqa: E402
from dash_attn.integrations.trainer import ledger_callback  # noqa: E402
from dash_attn.ledgers import LedgerError, compare_runs, read_run  # noqa: E402
from model_sizes import SMALL  # noqa: E402
from process_settings import restored_settings  # noqa: E402

SIZES = {**SMALL, "num_attention_heads": 2, "use_cache": False}


@pytest.fixture(autouse=True)
def _settings_restored() -> Iterator[None]:
    with restored_settings():
        yield


def train(folder: Path, seed: int = 1, steps: int = 4, resume: bool = False, save_at: int = 0, **options: Any) -> None:
    huggingface.enable()
    source = torch.Generator().manual_seed(0)
    rows = [torch.randint(64, (24,), generator=source).tolist() for _ in range(32)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "out"),
        full_determinism=True,
        seed=seed,
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant_with_warmup",  # a checkpoint is written after the schedule's step, and has the next learning rate
        warmup_steps=3,
        use_cpu=True,
        report_to=[],
        save_strategy="steps" if save_at else "no",
        save_steps=save_at or 500,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    transformers.set_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attn_implementation="dash_attn"))
    data = [{"input_ids": row, "labels": row} for row in rows]
    callbacks = [ledger_callback(folder / "ledger", **options)]
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume or None)


def test_runs_of_a_trainer(tmp_path: Path) -> None:
    train(tmp_path / "a", detail=range(2, 3))
    train(tmp_path / "b")
    found = compare_runs(tmp_path / "a/ledger", tmp_path / "b/ledger", partial=True)  # b has no detail
    assert found.agree
    assert found.steps == (0, 1, 2, 3)
    step = read_run(tmp_path / "a/ledger")[0].steps[2]
    phases = {entry.phase for entry in step.layout.entries}
    assert phases == {"batch", "forward", "loss", "backward", "gradient", "weight", "optimizer", "rng"}
    assert len(step.layout.attention) == 4  # two layers, two micro-batches
    assert {entry.tensor for entry in step.layout.entries if entry.phase == "batch"} >= {"batch[0]['input_ids']", "batch[1]['labels']"}


def test_a_trainer_with_another_seed(tmp_path: Path) -> None:
    train(tmp_path / "a", steps=1)
    train(tmp_path / "b", steps=1, seed=2)
    found = compare_runs(tmp_path / "a/ledger", tmp_path / "b/ledger").first
    assert found is not None
    assert (found.step, found.before_it, found.pair.entry.phase) == (0, True, "weight")


def test_a_resumed_trainer_appends(tmp_path: Path) -> None:
    train(tmp_path / "a")
    train(tmp_path / "b", steps=2, save_at=2)
    train(tmp_path / "b", resume=True)
    run = read_run(tmp_path / "b/ledger")[0]
    assert [head["first_step"] for head in run.heads] == [0, 2]
    found = compare_runs(tmp_path / "a/ledger", tmp_path / "b/ledger")
    assert found.agree, found.first
    assert found.steps == (0, 1, 2, 3)
    with pytest.raises(LedgerError, match="leave out resume_from"):
        ledger_callback(tmp_path / "c", resume_from=3)


def test_a_training_that_another_one_follows_did_not_end_well(tmp_path: Path) -> None:
    """A trainer that raised does not say so: the callback hears of it when it begins anew."""
    callback, model = ledger_callback(tmp_path), torch.nn.Linear(2, 2)
    nothing, start = None, SimpleNamespace(global_step=0)
    callback.on_train_begin(nothing, start, nothing, model=model)
    callback.on_optimizer_step(nothing, start, nothing, model=model, optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(LedgerError, match="has a run already"):
        callback.on_train_begin(nothing, start, nothing, model=model)
    assert read_run(tmp_path)[0].ending() == "ended by another training, before this one was done"
