"""Attention as a differentiable function of tensors and options. The backend does the arithmetic."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..backends import run
from ..call.call import Call, Gradients, Grads, Modifiers, Saved, no_pairs
from ..call.offsets import SequenceOffsets
from ..call.options import AttentionOptions
from .observers import observers, tell_observers
from .pytorch import alert_if_unordered


def attention_forward(call: Call) -> Saved:
    if not call.options.ordered:
        alert_if_unordered()
    saved = run.forward(call)
    if observers and not no_pairs(call):
        tell_observers(call)
    return saved


def attention_backward(call: Call, saved: Saved, grads: Grads) -> Gradients:
    if not call.options.ordered:
        alert_if_unordered()
    return run.backward(call, saved, grads)


ANEW = SimpleNamespace(forward=attention_forward, backward=attention_backward, alone=True)  # for calls that are not known


def _as_recomputed(modifiers: Modifiers | None, saved: list[Tensor | None]) -> Modifiers | None:
    """With activation checkpointing the saved output is that of a second forward, so seeds and slopes, the last that were saved, must be
    those of it, too."""
    if modifiers is None:
        return None
    *_, seeds, slopes = saved
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
    """Attention.apply(q, k, v, sinks, options, offsets, modifiers) -> (out, lse). Differentiable once, through both.

    A last argument runs the passes: a KnownCall, where there is one, or a rank that is not alone. Such a rank sees with the others whether
    all have what they saved, and leaves out nothing that others wait for.
    """

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
        passes: Any = ANEW,
    ) -> tuple[Tensor, Tensor]:
        out, lse = passes.forward(Call(q, k, v, options, offsets, sinks, modifiers))
        # Saved like the other tensors, so that changing them in place before the backward is noticed.
        ends = () if offsets is None else (offsets.cu_seqlens_q, offsets.cu_seqlens_k)
        ctx.save_for_backward(q, k, v, sinks, out, lse, *ends, *(() if modifiers is None else modifiers[:2]))
        ctx.rest = options, offsets, modifiers, passes
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        options, offsets, modifiers, passes = ctx.rest
        q, k, v, sinks, out, lse, *others = ctx.saved_tensors if passes.alone else passes.saved(ctx)
        if dout is None:
            if dlse is None and passes.alone:
                return (None,) * 8
            dout = torch.zeros_like(out)  # only the LSE was used
        call = Call(q, k, v, options, offsets, sinks, _as_recomputed(modifiers, others))
        gradients: tuple[Tensor | None, ...]
        if not torch.is_grad_enabled():
            gradients = passes.backward(call, Saved(out, lse), Grads(dout, dlse))
        else:  # create_graph=True
            with torch.no_grad():
                gradients = passes.backward(call, Saved(out, lse), Grads(dout, dlse))
            gradients = FirstGradientsOnly.apply(len(gradients), *gradients, dout, q, k, v, sinks, dlse)  # type: ignore[no-untyped-call]
        return *gradients, None, None, None, None  # PyTorch drops those that nobody asked for

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError("dash_attn attention has no forward-mode derivative; use loss.backward() or torch.autograd.grad")
