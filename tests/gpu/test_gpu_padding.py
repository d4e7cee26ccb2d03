"""Padded batches on a GPU: the bits of each sequence alone, nothing read on the host, CUDA graphs, holes that stop the context."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dash_attn import Causal, Full, Mask, Window, flash_attn_func
from dense import largest_error
from gpu_helpers import DEVICE, poisoned_memory, run_script
from graphs import capture
from padded_rows import AnyAttention, SelfAttention, attend, padding_mask

pytestmark = pytest.mark.gpu

LENGTH = 1100
LENGTHS = (700, 1100, 1, 333, 0)
MASKS: list[Mask] = [Causal(), Window(300, 0), Full(), Window(200, 100)]


def inputs(dim: int = 128, seed: int = 0) -> list[Tensor]:
    """q, k, v and the gradient of the output, laid out as a model's projections lay them."""
    made = torch.Generator(DEVICE).manual_seed(seed)
    q, k, v, dout = (
        torch.randn(len(LENGTHS), LENGTH, heads, dim, generator=made, device=DEVICE, dtype=torch.bfloat16) for heads in (4, 2, 2, 4)
    )
    return [*(x.transpose(1, 2) for x in (q, k, v)), dout]


def step(tensors: list[Tensor], mask: Mask, kept: Tensor, **options: Any) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out = attend(SelfAttention(), *leaves, mask, kept, **options)
    return [out.detach(), *(x.transpose(1, 2) for x in torch.autograd.grad(out, leaves, tensors[3]))]


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_sequence_has_the_bits_it_has_alone(mask: Mask, side: str, dim: int) -> None:
    """Keys and values of padding are NaN, and so is new memory; softcap and sinks as in Gemma 2 and gpt-oss."""
    kept, tensors = padding_mask(side, LENGTHS, LENGTH, DEVICE), inputs(dim)
    for tensor in tensors[:3]:
        tensor.transpose(1, 2)[kept == 0] = torch.nan
    options = {"softcap": 20.0, "s_aux": torch.linspace(-1, 2, 4, device=DEVICE)}
    with poisoned_memory():
        found = step(tensors, mask, kept, **options)
    for row, keeps in enumerate(kept.bool()):
        assert not any(result[row][~keeps].any() for result in found)
        if not keeps.any():
            continue
        alone = [x[row : row + 1].transpose(1, 2)[:, keeps].detach().requires_grad_() for x in tensors[:3]]
        out = flash_attn_func(*alone, mask=mask, softcap=20.0, sinks=options["s_aux"])
        expected = [out.detach(), *torch.autograd.grad(out, alone, tensors[3][row : row + 1, keeps])]
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine[row][keeps], theirs[0])


def test_nothing_is_read_on_the_host() -> None:
    kept, tensors = padding_mask("left", LENGTHS, LENGTH, DEVICE), inputs()
    step(tensors, Causal(), kept)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(tensors, Causal(), kept)
        with pytest.raises(RuntimeError, match="synchroniz"):
            bool(kept.all())  # the control
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_a_step_of_a_decoder_attends_what_is_kept_of_its_source(side: str) -> None:
    """One query in cross attention, which is none of the padded tokens. Nothing is read on the host."""
    masking = pytest.importorskip("transformers.masking_utils")
    from dash_attn.integrations import huggingface

    kept, (q, k, v, _) = padding_mask(side, LENGTHS, LENGTH, DEVICE), inputs()
    q = q[:, :, :1]
    for tensor in (k, v):
        tensor.transpose(1, 2)[kept == 0] = torch.nan

    def attended() -> Tensor:
        made = huggingface.mask_for(len(LENGTHS), 1, LENGTH, mask_function=masking.bidirectional_mask_function, attention_mask=kept)
        return huggingface.attention(AnyAttention(), q, k, v, made)[0]

    out = attended()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert out.shape == attended().shape
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for row, keeps in enumerate(kept.bool()):
        alone = [x[row : row + 1].transpose(1, 2) for x in (q, k[:, :, keeps], v[:, :, keeps])]
        assert torch.equal(out[row], flash_attn_func(*alone)[0]) if keeps.any() else not out[row].any()


@pytest.mark.parametrize("mask", MASKS[:2], ids=str)
def test_a_cuda_graph_takes_other_lengths(mask: Mask) -> None:
    static, kept = inputs(), padding_mask("left", LENGTHS, LENGTH, DEVICE)
    graph, captured = capture(lambda: step(static, mask, kept))
    for where, lengths in (("left", LENGTHS), ("right", (5, 1000, 64, 1100, 128)), ("both", (1100,) * 5)):
        kept.copy_(padding_mask(where, lengths, LENGTH, DEVICE))
        for old, new in zip(static, inputs(seed=len(where)), strict=True):
            old.copy_(new)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, step(static, mask, kept), strict=True))


HOLES = """
import torch
from dash_attn import Causal
from padded_rows import SelfAttention, attend
q, k, v = (torch.randn(2, heads, 300, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
kept = torch.ones(2, 300, device="cuda", dtype=torch.long)
kept[1, 100:120] = 0
attend(SelfAttention(), q, k, v, Causal(), kept)
torch.cuda.synchronize()
print("finished")
"""


def test_holes_stop_the_context_with_a_message() -> None:
    done = run_script(HOLES)
    assert done.returncode != 0
    assert "finished" not in done.stdout
    assert "keeps one stretch of each row" in done.stderr, done.stderr


def model_of(name: str, implementation: str) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 128, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 64, "use_cache": False}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    config = {
        "llama": lambda: transformers.LlamaConfig(**sizes),
        "mistral": lambda: transformers.MistralConfig(**sizes, sliding_window=200),
        "gemma2": lambda: transformers.Gemma2Config(**sizes, sliding_window=200),
        "gpt_oss": lambda: transformers.GptOssConfig(**sizes, **experts, sliding_window=200),
    }[name]()
    torch.manual_seed(0)
    chosen = {"attn_implementation": implementation, "experts_implementation": "batched_mm", "dtype": torch.bfloat16}
    return transformers.AutoModelForCausalLM.from_config(config, **chosen).to(DEVICE)


def train(model: Any, call: Any, kept: Tensor) -> list[Tensor]:
    """Logits of what is no padding, and gradients."""
    tokens = torch.randint(128, kept.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    found = call(input_ids=tokens, attention_mask=kept, position_ids=(kept.cumsum(1) - 1).clamp(min=0)).logits
    found = found[kept.bool()].float()
    found.square().mean().backward()
    return [found.detach(), *(weight.grad.float() for weight in model.parameters())]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_a_model_matches_eager_and_traces_whole(name: str, side: str) -> None:
    from dash_attn.integrations import huggingface

    kept = padding_mask(side, (300, 512, 65), 512, DEVICE)
    pytest.importorskip("transformers")
    huggingface.enable()
    models = [model_of(name, kind) for kind in ("dash_attn", "eager", "dash_attn", "eager")]
    ours, eager = train(models[0], models[0], kept), train(models[1], models[1], kept)
    exact = train(models[3].float(), models[3], kept)
    for mine, theirs, truth in zip(ours, eager, exact, strict=True):
        assert largest_error(mine, truth) <= 2 * largest_error(theirs, truth) + 1e-3 * truth.abs().max().item()
    torch._dynamo.reset()
    traced = train(models[2], torch.compile(models[2], fullgraph=True, backend="aot_eager"), kept)
    assert all(torch.equal(a, b) for a, b in zip(traced, ours, strict=True))
