"""Runs the passes of a call on the current stream."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ...call.call import Call, Gradients, Grads, Saved
from .setup import Passes, RowValues, aligned, forward_launch, gradient_launches, offsets_launch, readable, sink_launch, statistics_launch
from .support import check_elements


def forward(call: Call) -> Saved:
    """The LSE is float32."""
    check_elements(call)
    with on_device(call.q):
        passes = Passes(call)
        if call.offsets is not None:
            offsets_launch(passes).run()
        out = passes.q.new_empty((*call.q.shape[:-1], passes.v.shape[-1]))
        lse = call.q.new_empty(passes.lse_shape, dtype=torch.float32)
        forward_launch(passes, out, lse, None if call.sinks is None else logits_of(call.sinks)).run()
    return Saved(cut(out, call.v.shape[-1]), lse)


def backward(call: Call, saved: Saved, grads: Grads) -> Gradients:
    check_elements(call)
    with on_device(call.q):
        passes = Passes(call)
        dout, rows = aligned(grads.out), RowValues.empty(passes)
        dlse = None if grads.lse is None else readable(grads.lse)
        statistics_launch(passes, aligned(saved.out), dout, readable(saved.lse), dlse, rows).run()
        dq, dk, dv = (x.new_empty(x.shape) for x in (passes.q, passes.k, passes.v))
        for launch in gradient_launches(passes, dout, rows, (dq, dk, dv)):
            launch.run()
        dsinks = None if call.sinks is None else _sink_gradient(passes, rows, call.sinks)
    return Gradients(cut(dq, call.q.shape[-1]), cut(dk, call.k.shape[-1]), cut(dv, call.v.shape[-1]), dsinks)


def _sink_gradient(passes: Passes, rows: RowValues, sinks: Tensor) -> Tensor:
    logits = logits_of(sinks)
    gradient = torch.empty_like(logits)
    sink_launch(passes, rows, logits, gradient).run()
    return gradient.to(sinks.dtype)


def logits_of(sinks: Tensor) -> Tensor:
    """In float32, where kernels can read them."""
    return readable(sinks.detach().float())


def cut(tensor: Tensor, dim: int) -> Tensor:
    """Without the columns that aligning has added."""
    return tensor if tensor.shape[-1] == dim else tensor[..., :dim].contiguous()


def on_device(x: Tensor) -> AbstractContextManager[object]:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
