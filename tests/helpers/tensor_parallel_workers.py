"""What each rank of a tensor-parallel transformers model does in the tests."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dash_attn import flash_attn_func
from dash_attn.integrations import huggingface

LENGTH, RANKS, DIM = 300, 2, 16
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": DIM}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = torch.randint(64, (2, LENGTH), generator=torch.Generator().manual_seed(0))
Call = tuple[tuple[Tensor, ...], dict[str, Any]]


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, attn_implementation="dash_attn"))


def call_of(model: Any) -> tuple[Tensor, Call]:
    """The logits, and what the model's one layer calls attention with."""
    calls: list[Call] = []
    original = huggingface.flash_attn_func

    def noting(*tensors: Tensor, **options: Any) -> Any:
        calls.append((tuple(x.detach() for x in tensors), options))
        return original(*tensors, **options)

    huggingface.flash_attn_func = noting  # type: ignore[assignment]
    try:
        logits = model(input_ids=TOKENS, use_cache=False).logits
    finally:
        huggingface.flash_attn_func = original
    assert len(calls) == 1
    return logits.detach(), calls[0]


def gradients(call: Call, heads: slice, **changed: Any) -> tuple[Tensor, ...]:
    """With the gradient of these query heads of the whole model's output."""
    tensors, options = call
    leaves = [x.clone().requires_grad_() for x in tensors]
    dout = torch.randn(2, LENGTH, HEADS["num_attention_heads"], DIM, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad(flash_attn_func(*leaves, **{**options, **changed}), leaves, dout[:, :, heads])


def sharded_llama(rank: int) -> dict[str, Any]:
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    huggingface.enable()
    whole_logits, whole = call_of(llama())
    mesh = dist.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    model = llama()
    plan = (model._expand_parallel_plan(model.tp_plan),) if hasattr(model, "_expand_parallel_plan") else ()  # asked for from 5.23 on
    logits, mine = call_of(apply_tensor_parallelism(model, mesh, *plan))
    q_heads, kv_heads = slice(2 * rank, 2 * rank + 2), slice(rank, rank + 1)
    own = (q_heads, kv_heads, kv_heads)
    expected = [x[:, :, heads] for x, heads in zip(gradients(whole, slice(None)), own, strict=True)]
    same_inputs = [torch.equal(x, y[:, :, heads]) for x, y, heads in zip(mine[0], whole[0], own, strict=True)]
    return {
        "head_offset": mine[1]["head_offset"],
        "logits_off": float((logits - whole_logits).abs().max()),
        "same_inputs": same_inputs,
        "same": [torch.equal(x, y) for x, y in zip(gradients(mine, q_heads), expected, strict=True)],
        "same_without": [torch.equal(x, y) for x, y in zip(gradients(mine, q_heads, head_offset=0), expected, strict=True)],
    }
