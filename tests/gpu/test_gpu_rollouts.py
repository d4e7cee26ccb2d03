"""Whole models on a GPU: tokens that `generate` samples have the training forward's logits. Products are probed, and settings come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from continuous_batching import batched_together  # noqa: E402
from dash_attn import Unsupported, invariance  # noqa: E402
from dash_attn.distributed import TreeAccumulator  # noqa: E402
from dash_attn.integrations import huggingface  # noqa: E402
from dash_attn.invariance import products  # noqa: E402
from dash_attn.invariance.probe import ways  # noqa: E402
from dash_attn.invariance.record import record_of  # noqa: E402
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


@pytest.mark.parametrize("name", ["Llama", "Olmo2"])
def test_continuous_batching_has_the_log_probabilities_of_training(name: str) -> None:
    model = model_of(name, torch.bfloat16)
    prompts = [torch.randint(1, 4096, (length,)).tolist() for length in (1, 7, 30, 64, 90)]
    with invariance.enable():
        for prompt, request in zip(prompts, batched_together(model, prompts, NEW, return_logprobs=True), strict=True):
            sequence = torch.tensor(prompt + request.generated_tokens, device="cuda")
            logits = model(input_ids=sequence[None], use_cache=False).logits[0, -NEW - 1 : -1].detach()
            trained = logits.float().softmax(-1).gather(1, sequence[-NEW:, None])[:, 0].log()
            assert same_bits(torch.tensor(request.logprobs), trained.cpu())


def test_a_planted_product_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It looks at the place of a row."""
    real = products._linear
    places = torch.arange(2**14, device="cuda", dtype=torch.bfloat16)[:, None]
    monkeypatch.setenv("DASH_ATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(products, "_linear", lambda x, weight, bias: real(x, weight, bias) + places[: len(x)])
    ways.clear()
    record_of.cache_clear()
    with invariance.enable(), pytest.raises(Unsupported, match="K 2048, N 1040, bfloat16 on cuda:0 gives a row other bits"):
        nn.Linear(2048, 1040, bias=False, dtype=torch.bfloat16, device="cuda")(torch.randn(3, 2048, device="cuda").bfloat16())
    record_of.cache_clear()


@pytest.mark.parametrize("columns", [50257, 32001, 4097])
def test_rows_of_a_large_vocabulary(columns: int) -> None:
    """Which begin at any multiple of 4 bytes."""
    x = torch.randn(40, columns, device="cuda")
    with invariance.enable():
        whole = x.log_softmax(-1), x.softmax(-1)
        for row in range(40):
            alone = x[row : row + 1].clone()
            assert same_bits(alone.log_softmax(-1).contiguous(), whole[0][row : row + 1].contiguous())
            assert same_bits(alone.softmax(-1).contiguous(), whole[1][row : row + 1].contiguous())


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
