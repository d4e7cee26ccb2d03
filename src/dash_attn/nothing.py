"""Attention where there is no query or no key. A backend has no tile to visit then, so none is asked."""

from __future__ import annotations

import torch
from torch import Tensor


def no_pairs(q: Tensor, k: Tensor) -> bool:
    return q.numel() == 0 or k.numel() == 0


def forward_of_nothing(q: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output 0 and LSE of an empty sum: the sink, or -inf without one. Dense or packed tensors."""
    *batch, length, heads, _ = q.shape
    lse = q.new_full((*batch, heads, length), -torch.inf, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    if sinks is not None:
        lse.copy_(sinks.detach()[:, None].expand_as(lse))
    return q.new_zeros(*batch, length, heads, v.shape[-1]), lse


def backward_of_nothing(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Zeros, laid out like any other gradient: contiguous."""
    return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape), None if sinks is None else sinks.new_zeros(sinks.shape)
