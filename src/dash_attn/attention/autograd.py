"""Attention as a differentiable function of tensors and options. The backend does the arithmetic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backends import backend_for
from ..call.empty import backward_of_nothing, forward_of_nothing, no_pairs
from ..call.modifiers import Modifiers
from ..call.offsets import SequenceOffsets
from ..call.options import AttentionOptions
from .call_log import LOG_CALLS, log_call
from .deterministic_setting import alert_if_unordered
from .observers import observers, tell_observers


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    offsets: SequenceOffsets | None = None,
    sinks: Tensor | None = None,
    modifiers: Modifiers | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and LSE."""
    alert_if_unordered(options)
    backend = backend_for(options.backend, q.device)
    if no_pairs(q, k):
        if offsets is not None and q.device.type == "cpu":
            offsets.sequences(len(q), len(k))  # no backend looks at the lengths
        return forward_of_nothing(q, v, sinks)
    results = backend.forward(q, k, v, options, offsets, sinks, *_if_any(modifiers))
    if LOG_CALLS:
        log_call(q, k, v, options, offsets)
    if observers:
        tell_observers(q, k, v, options, offsets)
    return results


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: AttentionOptions,
    offsets: SequenceOffsets | None = None,
    sinks: Tensor | None = None,
    dlse: Tensor | None = None,
    modifiers: Modifiers | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dQ, dK, dV and, where there are sinks, their gradient. `dout` and `dlse` are the gradients of output and LSE."""
    alert_if_unordered(options)
    backend = backend_for(options.backend, q.device)
    if no_pairs(q, k):
        return backward_of_nothing(q, k, v, sinks, dlse)
    return backend.backward(dout, q, k, v, out, lse, options, offsets, sinks, dlse, *_if_any(modifiers))


def _if_any(modifiers: Modifiers | None) -> tuple[Modifiers, ...]:
    return () if modifiers is None else (modifiers,)


def _as_recomputed(modifiers: Modifiers | None, seeds: Tensor | None, slopes: Tensor | None) -> Modifiers | None:
    """With activation checkpointing the saved output is that of a second forward, so seeds and slopes must be those of it, too."""
    if modifiers is None:
        return None
    if seeds is not None and modifiers.seeds is not None and seeds.is_cpu and not torch.equal(seeds, modifiers.seeds):
        raise RuntimeError(
            "activation checkpointing has drawn other seeds for dropout than the forward had: leave preserve_rng_state=True, or give"
            f" dropout_seed; got seeds {seeds.tolist()}, in the forward {modifiers.seeds.tolist()}"
        )
    return modifiers._replace(seeds=seeds, slopes=slopes)


class FirstGradientsOnly(torch.autograd.Function):
    """Passes the gradients through; they depend on the other arguments, but nobody may differentiate them again."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(None if gradient is None else gradient.view_as(gradient) for gradient in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError("dash_attn attention has first gradients only: its gradients cannot be differentiated again (double backward)")


class Attention(torch.autograd.Function):
    """Attention.apply(q, k, v, sinks, options, offsets, modifiers) -> (out, lse). Differentiable once, through both."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        options: AttentionOptions,
        offsets: SequenceOffsets | None,
        modifiers: Modifiers | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = attention_forward(q, k, v, options, offsets, sinks, modifiers)
        # Saved like the other tensors, so that changing them in place before the backward is noticed.
        ends = (None, None) if offsets is None else (offsets.cu_seqlens_q, offsets.cu_seqlens_k)
        ctx.save_for_backward(q, k, v, sinks, out, lse, *ends, *(modifiers or Modifiers())[:2])
        ctx.options, ctx.offsets, ctx.modifiers = options, offsets, modifiers
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse, _, _, *given = ctx.saved_tensors
        if dout is None:
            if dlse is None:
                return (None,) * 7
            dout = torch.zeros_like(out)  # only the LSE was used
        arguments = (dout, q, k, v, out, lse, ctx.options, ctx.offsets, sinks, dlse, _as_recomputed(ctx.modifiers, *given))
        if not torch.is_grad_enabled():
            gradients = attention_backward(*arguments)
        else:  # create_graph=True
            with torch.no_grad():
                gradients = attention_backward(*arguments)
            gradients = FirstGradientsOnly.apply(len(gradients), *gradients, dout, q, k, v, sinks, dlse)  # type: ignore[no-untyped-call]
        wanted = (g if needed else None for g, needed in zip(gradients, ctx.needs_input_grad, strict=False))
        return *wanted, None, None, None

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError("dash_attn attention has no forward-mode derivative; use loss.backward() or torch.autograd.grad")
