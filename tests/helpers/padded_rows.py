"""Rows of a batch with padding, as transformers describes them, and layers that attend them through our door."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dash_attn import Mask
from dash_attn.integrations import huggingface
from dash_attn.integrations._layer_mask import LayerMask, Padding


class SelfAttention(nn.Module):
    """A layer that can attend to its own tokens only, going by what its forward takes."""

    is_causal = False

    def forward(self, hidden_states: Any, attention_mask: Any) -> None: ...


class AnyAttention(nn.Module):
    """A layer that may attend the tokens of another model part."""

    is_causal = False

    def forward(self, hidden_states: Any, key_value_states: Any, attention_mask: Any) -> None: ...


def padding_mask(side: str, lengths: tuple[int, ...], length: int, device: str | torch.device = "cpu") -> Tensor:
    kept = torch.zeros(len(lengths), length, dtype=torch.long)
    for row, count in zip(kept, lengths, strict=True):
        before = {"left": length - count, "right": 0, "both": (length - count) // 2}[side]
        row[before : before + count] = 1
    return kept.to(device)


def attend(layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Mask, kept: Tensor, **options: Any) -> Tensor:
    """What a layer of a model does with a padded batch. Tensors are (batch, heads, length, dim), the result (batch, length, ...)."""
    given = LayerMask(mask, (q.shape[2], k.shape[2]))
    given.padding = Padding(kept.bool(), q.shape[2], mask)
    out, _ = huggingface.attention(layer, q, k, v, given, **options)
    return out
