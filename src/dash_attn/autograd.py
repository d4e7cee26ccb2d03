"""Attention as a differentiable function of tensors and options. The backend does the arithmetic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .backends import load, resolve
from .call_log import LOG_CALLS, log_call
from .options import AttentionOptions


def attention_forward(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Output and LSE."""
    backend = resolve(options.backend, q.device)
    if _has_no_pairs(q, k):
        batch, q_len, heads, _ = q.shape
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        return q.new_zeros(batch, q_len, heads, v.shape[-1]), q.new_full((batch, heads, q_len), -torch.inf, dtype=dtype)
    results = load(backend).forward(q, k, v, options)
    if LOG_CALLS:
        log_call(q, k, v, options, backend)
    return results


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


class FirstGradientsOnly(torch.autograd.Function):
    """Passes dQ, dK and dV through; they depend on the other arguments, but nobody may differentiate them again."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(gradient.view_as(gradient) for gradient in tensors[:3])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError("dash_attn attention has first gradients only: its gradients cannot be differentiated again (double backward)")


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
    def backward(ctx: Any, dout: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return None, None, None, None
        q, k, v, out, lse = ctx.saved_tensors
        with torch.no_grad():
            gradients = attention_backward(dout, q, k, v, out, lse, ctx.options)
        if torch.is_grad_enabled():  # create_graph=True
            gradients = FirstGradientsOnly.apply(*gradients, dout, q, k, v)
        wanted = (g if needed else None for g, needed in zip(gradients, ctx.needs_input_grad, strict=False))
        return *wanted, None
