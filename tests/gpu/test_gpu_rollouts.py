"""Whole models on a GPU: tokens that `generate` samples have the training forward's logits. Products are probed, and settings come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from dash_attn import invariance  # noqa: E402
from dash_attn.distributed import TreeAccumulator  # noqa: E402
from dash_attn.integrations import huggingface  # noqa: E402
from dash_attn.invariance.switches import SWITCHES  # noqa: E402
from dense import same_bits  # noqa: E402

pytestmark = pytest.mark.gpu
SIZES = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 2, "num_attention_heads": 8}
NEW, LENGTH = 12, 90


def model_of(name: str, dtype: torch.dtype) -> Any:
    huggingface.enable()
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, num_key_value_heads=2, eos_token_id=None, pad_token_id=0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="dash_attn", dtype=dtype)
    return model.cuda().eval()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch", [1, 2, 7, 32])
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Olmo2"])
def test_generate_has_the_logits_of_training(name: str, batch: int, dtype: torch.dtype) -> None:
    model = model_of(name, dtype)
    prompt = torch.randint(1, 4096, (batch, LENGTH), device="cuda")
    mask = (torch.arange(LENGTH, device="cuda") >= torch.arange(batch, device="cuda")[:, None] * 2).long()
    with invariance.enable():
        choices = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        out = model.generate(prompt, attention_mask=mask, **choices)
        for row in range(batch):
            sequence = out.sequences[row, 2 * row :]
            whole = model(input_ids=sequence[None], attention_mask=torch.ones_like(sequence)[None], use_cache=False).logits[0].detach()
            assert same_bits(torch.stack(out.logits, 1)[row].to(dtype), whole[-NEW - 1 : -1].contiguous())


def test_products_are_proved_and_settings_come_back() -> None:
    layer = nn.Linear(2048, 1024, dtype=torch.bfloat16, device="cuda")
    before = SWITCHES.library, SWITCHES.bf16, SWITCHES.fp16
    report = invariance.check(layer)
    assert report.findings[0].holds in ("proved", "by construction")
    x = torch.randn(700, 2048, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    with invariance.enable():
        whole = layer(x)
        assert all(same_bits(layer(x[:count]).detach(), whole[:count].detach()) for count in (1, 2, 3, 17, 100, 699))
        whole.sum().backward()
        few = torch.autograd.grad(layer(x[:1]).sum(), x)[0]
    assert x.grad is not None
    assert same_bits(few[:1], x.grad[:1])
    assert (SWITCHES.library, SWITCHES.bf16, SWITCHES.fp16) == before


def gradients(model: Any, size: int) -> list[torch.Tensor]:
    """Of eight sequences of several lengths, padded."""
    tokens = torch.randint(1, 4096, (8, LENGTH), generator=torch.Generator().manual_seed(2)).cuda()
    mask = (torch.arange(LENGTH, device="cuda") < LENGTH - 9 * torch.arange(8, device="cuda")[:, None]).long()
    model.zero_grad()
    accumulator = TreeAccumulator(8)
    with invariance.enable():
        for rows, kept in zip(tokens.split(size), mask.split(size), strict=True):
            with invariance.per_sequence(model, accumulator, kept):
                logits = model(input_ids=rows, attention_mask=kept, use_cache=False).logits
                (-(invariance.log_probs(logits, rows) * kept).sum() / 100).backward()
        accumulator.finish(model, divide=False)
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Olmo2"])
def test_every_size_of_micro_batch(name: str) -> None:
    model = model_of(name, torch.bfloat16)
    whole = gradients(model, 8)
    for size in (1, 2, 4):
        assert all(same_bits(one, other) for one, other in zip(gradients(model, size), whole, strict=True))
