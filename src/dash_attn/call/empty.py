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


def backward_of_nothing(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, dlse: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Zeros, laid out like any other gradient: contiguous. Only the sinks, which are the LSE here, have its gradient."""
    dsinks = None if sinks is None else sink_gradient_of_nothing(sinks, dlse)
    return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape), dsinks


def sink_gradient_of_nothing(sinks: Tensor, dlse: Tensor | None) -> Tensor:
    """The sum of each head's rows, sequence by sequence. A sink of -inf is no sink."""
    total = torch.zeros(sinks.shape, dtype=sinks.dtype if dlse is None else dlse.dtype, device=sinks.device)
    if dlse is not None:
        for sequence in dlse if dlse.ndim == 3 else dlse[None]:
            total += sequence.sum(-1)
        total.masked_fill_(sinks == -torch.inf, 0)
    return total.to(sinks.dtype)
