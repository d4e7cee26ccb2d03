"""Small language models of transformers, and a step of training. Import this module where transformers is."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from model_sizes import SMALL

SIZES = {**SMALL, "max_position_embeddings": 512, "use_cache": False}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=40),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=12),
    "qwen2-window": lambda: transformers.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=40, max_window_layers=1),
}
TOKENS = torch.randint(64, (2, 150), generator=torch.Generator().manual_seed(0))
PACKED = torch.cat([torch.arange(n) for n in (70, 1, 79)])[None]


def model_of(name: str, implementation: str, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=implementation, dtype=dtype)


def step(model: Any, tokens: Tensor = TOKENS, **arguments: Any) -> list[Tensor]:
    """Logits, gradients, and the weights after one step of training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = model(input_ids=tokens, labels=tokens, **arguments)
    result.loss.backward()
    optimizer.step()
    return [result.logits.detach(), *(p.grad for p in model.parameters()), *(p.detach() for p in model.parameters())]
