"""Ledgers of sampler and trainer: `dash-attn diff` names the module in which they part."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dash_attn
from dash_attn import invariance
from dash_attn.cli import main
from dash_attn.ledgers import compare_runs
from model_sizes import SMALL

PROMPT, NEW = 20, 12
NORM = "model.layers.1.post_attention_layernorm"


def last_token(x: Tensor) -> Tensor:
    return x[:, -1:] if x.ndim > 1 else x[-1:]


def model_of() -> Any:
    transformers = pytest.importorskip("transformers")
    from dash_attn.integrations import huggingface

    huggingface.enable()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, eos_token_id=None, bos_token_id=None, pad_token_id=0, attn_implementation="dash_attn")
    return transformers.LlamaForCausalLM(config).eval()


def record(model: Any, folder: Path) -> None:
    """A step per token: of the sampler as it comes, of the trainer as the last of a forward up to it."""
    prompt = torch.randint(1, 64, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    given: set[str] = set()  # to the model by `generate`: up to transformers 5.18 a mask, too

    def note(_: Any, __: Any, arguments: dict[str, Any]) -> None:
        given.update(name for name, value in arguments.items() if value is not None)

    def told(_: Tensor, scores: Tensor) -> Tensor:
        ledger.step(model)
        return scores

    with dash_attn.ledger(folder / "sampler", detail=True, view=last_token) as ledger:
        ledger.watch(model)
        noting = model.register_forward_pre_hook(note, with_kwargs=True)
        tokens = model.generate(prompt, max_new_tokens=NEW, do_sample=False, logits_processor=[told])
        noting.remove()
    with dash_attn.ledger(folder / "trainer", detail=True, view=last_token) as ledger:
        ledger.watch(model)
        for length in range(PROMPT, PROMPT + NEW):
            made = {"position_ids": torch.arange(length)[None], "attention_mask": torch.ones(1, length, dtype=torch.int64)}
            as_generate = {name: made[name] for name in given & set(made)}
            model(input_ids=tokens[:, :length], use_cache=False, **as_generate)
            ledger.step(model)


class OneRowNorm(nn.Module):
    """A norm that sums a single row in another order, as PyTorch's does on a GPU."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        squares = x.pow(2)
        if x.shape[:-1].numel() == 1:
            squares = squares.flip(-1).cumsum(-1)[..., -1:] / x.shape[-1]
        return self.weight * x * torch.rsqrt(squares.mean(-1, keepdim=True) + self.epsilon)


def test_a_norm_of_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of()
    model.model.layers[1].post_attention_layernorm = OneRowNorm(model.model.layers[1].post_attention_layernorm)
    with invariance.enable():
        record(model, tmp_path)
    found = compare_runs(tmp_path / "sampler", tmp_path / "trainer").first
    assert found is not None
    assert found.culprit.module == NORM
    assert found.step > 0, "the prompt has many rows in both"
    assert main.main(["diff", str(tmp_path / "sampler"), str(tmp_path / "trainer")]) == 1
    assert f"module               {NORM}" in capsys.readouterr().out


@pytest.mark.parametrize("inside", [True, False])
def test_sampler_and_trainer(inside: bool, tmp_path: Path) -> None:
    """The control: outside of `enable()` they part."""
    with invariance.enable() if inside else nullcontext():
        record(model_of(), tmp_path)
    found = compare_runs(tmp_path / "sampler", tmp_path / "trainer", partial=True)
    assert found.steps == tuple(range(NEW))
    if inside:
        assert found.first is None
    else:
        assert found.first is not None
        assert found.first.culprit.module == "lm_head", "of one row, where the trainer has all"
