"""Attention on a rank that has all rows of its heads: nothing is shared."""

from __future__ import annotations

import torch
from torch import Tensor

from ...attention.autograd import attention_backward, attention_forward
from ...call.documents import document_ends, laid_end_to_end
from ...call.modifiers import Modifiers
from ...call.offsets import SequenceOffsets
from ...call.options import AttentionOptions

Lengths = tuple[int, ...]
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]


def forward_alone(
    tensors: tuple[Tensor, Tensor, Tensor],
    options: AttentionOptions,
    documents: Lengths | None,
    sinks: Tensor | None,
    modifiers: Modifiers | None,
) -> tuple[Tensor, Tensor]:
    """Output and LSE. Documents in the row are packed sequences."""
    if documents is None:
        return attention_forward(*tensors, options, None, sinks, modifiers)
    batch, length, heads, _ = tensors[0].shape
    offsets, own = _offsets(tensors[0], documents), _of_each(modifiers, documents)
    q, k, v = map(laid_end_to_end, tensors)
    out, lse = attention_forward(q, k, v, options, offsets, sinks, own)
    return out.unflatten(0, (batch, length)), lse.view(heads, batch, length).transpose(0, 1).contiguous()


def backward_alone(
    tensors: tuple[Tensor, ...],
    of_rows: tuple[Tensor, Tensor | None],
    options: AttentionOptions,
    documents: Lengths | None,
    sinks: Tensor | None,
    modifiers: Modifiers | None,
) -> Gradients:
    """Gradients, of dout, q, k, v and out; of_rows: LSE and its gradient."""
    if documents is None:
        dout, q, k, v, out = tensors
        return attention_backward(dout, q, k, v, out, of_rows[0], options, None, sinks, of_rows[1], modifiers)
    batch, length = tensors[1].shape[:2]
    dout, q, k, v, out = map(laid_end_to_end, tensors)
    lse, dlse = of_rows[0].transpose(0, 1).flatten(1), None if of_rows[1] is None else of_rows[1].transpose(0, 1).flatten(1)
    offsets, own = _offsets(tensors[1], documents), _of_each(modifiers, documents)
    *gradients, dsinks = attention_backward(dout, q, k, v, out, lse, options, offsets, sinks, dlse, own)
    dq, dk, dv = (x.unflatten(0, (batch, length)) for x in gradients if x is not None)
    return dq, dk, dv, dsinks


def _offsets(q: Tensor, documents: Lengths) -> SequenceOffsets:
    ends = torch.from_numpy(document_ends(documents, len(q))).to(q.device)
    return SequenceOffsets(ends, ends, max(documents), max(documents))


def _of_each(modifiers: Modifiers | None, documents: Lengths) -> Modifiers | None:
    return None if modifiers is None else modifiers.of_documents(len(documents))
