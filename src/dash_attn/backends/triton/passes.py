"""Runs the passes of a call on the current stream. Documents in a row run as packed sequences."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ...call.documents import backward_of_documents, forward_of_documents, runs_packed
from ...call.modifiers import Modifiers
from ...call.offsets import SequenceOffsets
from ...call.options import AttentionOptions
from ..document_offsets import offsets_of
from .setup import Call, RowValues, aligned, forward_launch, gradient_launches, offsets_launch, readable, sink_launch, statistics_launch
from .support import check_elements

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    offsets: SequenceOffsets | None = None,
    sinks: Tensor | None = None,
    modifiers: Modifiers | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and LSE, which is float32."""
    check_elements(options.mask, modifiers)
    if offsets is None and runs_packed(options):
        return forward_of_documents(forward, (q, k, v), options, offsets_of(q, options), sinks, modifiers)
    with on_device(q):
        call = Call.of(q, k, v, options, offsets, modifiers)
        if offsets is not None:
            offsets_launch(call).run()
        out = call.q.new_empty((*q.shape[:-1], call.v.shape[-1]))
        lse = q.new_empty(call.lse_shape, dtype=torch.float32)
        forward_launch(call, out, lse, None if sinks is None else logits_of(sinks)).run()
    return cut(out, v.shape[-1]), lse


def backward(
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
) -> Gradients:
    """dQ, dK, dV and the gradient of the sinks."""
    check_elements(options.mask, modifiers)
    if offsets is None and runs_packed(options):
        return backward_of_documents(backward, (dout, q, k, v, out), (lse, dlse), options, offsets_of(q, options), sinks, modifiers)
    with on_device(q):
        call = Call.of(q, k, v, options, offsets, modifiers)
        dout, rows = aligned(dout), RowValues.empty(call)
        statistics_launch(call, aligned(out), dout, readable(lse), None if dlse is None else readable(dlse), rows).run()
        dq, dk, dv = (x.new_empty(x.shape) for x in (call.q, call.k, call.v))
        for launch in gradient_launches(call, dout, rows, (dq, dk, dv)):
            launch.run()
        dsinks = None if sinks is None else _sink_gradient(call, rows, sinks)
    return cut(dq, q.shape[-1]), cut(dk, k.shape[-1]), cut(dv, v.shape[-1]), dsinks


def _sink_gradient(call: Call, rows: RowValues, sinks: Tensor) -> Tensor:
    logits = logits_of(sinks)
    gradient = torch.empty_like(logits)
    sink_launch(call, rows, logits, gradient).run()
    return gradient.to(sinks.dtype)


def logits_of(sinks: Tensor) -> Tensor:
    """In float32, where kernels can read them."""
    return readable(sinks.detach().float())


def cut(tensor: Tensor, dim: int) -> Tensor:
    """Without the columns that aligning has added."""
    return tensor if tensor.shape[-1] == dim else tensor[..., :dim].contiguous()


def on_device(x: Tensor) -> AbstractContextManager[object]:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
