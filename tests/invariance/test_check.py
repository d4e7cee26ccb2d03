"""`check(model)` names what holds and what does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dash_attn import invariance


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("ij,kj->ik", x, x)


def scores(x: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(x, x, x)


class Inner(nn.Module):
    """What it calls is in other functions of this file."""

    def part(self, x: Tensor) -> Tensor:
        return scores(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


class SmallRouter(nn.Module):
    pass


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.pow(2).mean(-1, keepdim=True)


def foreign() -> nn.Module:
    made = type("Norm", (nn.Module,), {"__module__": "liger_kernel.rms_norm"})()
    assert isinstance(made, nn.Module)
    return made


def replaced() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    return layer


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (nn.BatchNorm1d(4), "statistics of the batch"),
        (nn.Conv1d(4, 4, 3), "convolutions"),
        (nn.LSTM(4, 4), "recurrent"),
        (nn.MultiheadAttention(4, 2), "attention that is not dash_attn's"),
        (nn.Dropout(0.1), "dropout in training"),
        (Odd(), "its code calls einsum"),
        (Inner(), "its code calls scaled_dot_product_attention"),
        (nn.LayerNorm((4, 4)), "a norm over more than a row"),
        (nn.EmbeddingBag(4, 4), "sums of rows"),
        (SmallRouter(), "experts"),
        (foreign(), "a kernel of another library"),
        (replaced(), "a kernel of another library"),
    ],
    ids=lambda case: type(case).__name__,
)
def test_what_is_not_covered(layer: nn.Module, why: str) -> None:
    report = invariance.check(nn.Sequential(nn.Linear(4, 4), layer))
    assert [finding.module for finding in report.uncovered] == ["1"]
    assert why in report.uncovered[0].why
    assert str(report).startswith("no ")


def test_what_is_covered() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.RMSNorm(4), Mean(), nn.Dropout(0.1), nn.SiLU()).eval()
    report = invariance.check(model)
    assert report.uncovered == ()
    assert {finding.kind for finding in report.findings} == {"Embedding", "Linear", "LayerNorm", "RMSNorm", "Mean"}
    assert "by construction  Linear: in blocks of 32 rows (1)" in str(report)


def test_models_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    from dash_attn.integrations import huggingface

    huggingface.enable()
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    for name in ("Llama", "Qwen3", "Gemma2", "Olmo2", "GPT2", "Phi"):
        config = getattr(transformers, f"{name}Config")(**sizes, num_key_value_heads=2, bos_token_id=None, eos_token_id=None)
        for implementation, expected in (("dash_attn", 0), ("eager", 1)):
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
            report = invariance.check(model)
            assert bool(report.uncovered) == expected, str(report)
            norms = [finding for finding in report.findings if "Norm" in finding.kind]
            assert len(norms) >= 3
            whole = [finding for finding in report.findings if finding.holds != "no" and finding.module in ("the model", "model")]
            assert whole == [], "parts are told of, not the model that calls them"
