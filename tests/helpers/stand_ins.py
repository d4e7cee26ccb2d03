"""Small stand-ins for libraries that are not installed here, from their documentation, so that the *before* examples run."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: tuple[int, int], deterministic: bool) -> Tensor:
    assert causal
    assert deterministic
    assert window_size[1] == 0
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
    keep = (distance >= 0) & (distance <= window_size[0])
    return _attention(q, k, v, attn_mask=keep)


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, key_ends: Tensor, *_: int, causal: bool) -> Tensor:
    assert torch.equal(ends, key_ends)
    lengths = ends.diff().tolist()
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    return torch.cat([_attention(a[None], b[None], c[None], is_causal=causal)[0] for a, b, c in parts])


class DotProductAttention:
    def __init__(self, num_attention_heads: int, kv_channels: int, num_gqa_groups: int, qkv_format: str, attn_mask_type: str) -> None:
        assert (qkv_format, attn_mask_type) == ("bshd", "causal")
        self.shapes = (num_attention_heads, kv_channels), (num_gqa_groups, kv_channels)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert (q.shape[2:], k.shape[2:]) == self.shapes
        return _attention(q, k, v, is_causal=True).flatten(-2)


def _attention(q: Tensor, k: Tensor, v: Tensor, **mask: Tensor | bool) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **mask).transpose(1, 2)  # type: ignore[arg-type]


def modules() -> dict[str, ModuleType]:
    """The stand-ins under the names that are imported."""
    flash, engine, engine_torch = (ModuleType(name) for name in ("flash_attn", "transformer_engine", "transformer_engine.pytorch"))
    flash.__dict__.update(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)
    engine_torch.__dict__.update(DotProductAttention=DotProductAttention)
    engine.__dict__.update(pytorch=engine_torch)
    return {module.__name__: module for module in (flash, engine, engine_torch)}
