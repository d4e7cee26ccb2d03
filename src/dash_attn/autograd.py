"""Attention as a differentiable function of tensors and options. The backend does the arithmetic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .backends import load, resolve
from .options import AttentionOptions


def attention_forward(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Output and LSE."""
    backend = resolve(options.backend, q.device)
    if _has_no_pairs(q, k):
        batch, q_len, heads, _ = q.shape
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        return q.new_zeros(batch, q_len, heads, v.shape[-1]), q.new_full((batch, heads, q_len), -torch.inf, dtype=dtype)
    return load(backend).forward(q, k, v, options)


def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV."""
    backend = resolve(options.backend, q.device)
    if _has_no_pairs(q, k):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    return load(backend).backward(dout, q, k, v, out, lse, options)


def _has_no_pairs(q: Tensor, k: Tensor) -> bool:
    """No sequence, no query or no key: a backend has no tile to visit."""
    return 0 in (q.shape[0], q.shape[1], k.shape[1])


class Attention(torch.autograd.Function):
    """Attention.apply(q, k, v, options) -> (out, lse). Differentiable once, and only through `out`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
        out, lse = attention_forward(q, k, v, options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return None, None, None, None
        q, k, v, out, lse = ctx.saved_tensors
        gradients = attention_backward(dout, q, k, v, out, lse, ctx.options)
        wanted = (g if needed else None for g, needed in zip(gradients, ctx.needs_input_grad, strict=False))
        return *wanted, None
