"""Attention on a rank that has all rows of its heads: nothing is shared. Documents in the row are packed sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from ...attention.autograd import attention_backward, attention_forward
from ...call.documents import document_ends, laid_end_to_end
from ...call.modifiers import Modifiers
from ...call.offsets import SequenceOffsets
from .asked import Given, Part
from .shared_call import Lengths

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]


def forward_alone(tensors: tuple[Tensor, ...], part: Part, given: Given) -> tuple[Tensor, Tensor]:
    """Output and LSE, of q, k and v."""
    q, k, v = tensors
    if part.documents is None:
        return attention_forward(q, k, v, part.options, None, given.sinks, given.modifiers)
    batch, length, heads, _ = q.shape
    offsets, modifiers = _of_each(part.documents, q, given)
    q, k, v = map(laid_end_to_end, tensors)
    out, lse = attention_forward(q, k, v, part.options, offsets, given.sinks, modifiers)
    return out.unflatten(0, (batch, length)), lse.view(heads, batch, length).transpose(0, 1).contiguous()


def backward_alone(rows: tuple[Tensor, ...], of_rows: tuple[Tensor, Tensor | None], part: Part, given: Given) -> Gradients:
    """Gradients, of dout, q, k, v and out; of_rows: LSE and its gradient."""
    (dout, q, k, v, out), (lse, dlse), options = rows, of_rows, part.options
    if part.documents is None:
        return attention_backward(dout, q, k, v, out, lse, options, None, given.sinks, dlse, given.modifiers)
    batch, length = q.shape[:2]
    offsets, modifiers = _of_each(part.documents, q, given)
    dout, q, k, v, out = map(laid_end_to_end, rows)
    lse, dlse = lse.transpose(0, 1).flatten(1), None if dlse is None else dlse.transpose(0, 1).flatten(1)
    dq, dk, dv, dsinks = attention_backward(dout, q, k, v, out, lse, options, offsets, given.sinks, dlse, modifiers)
    dq, dk, dv = (x.unflatten(0, (batch, length)) for x in (dq, dk, dv))
    return dq, dk, dv, dsinks


def _of_each(documents: Lengths, q: Tensor, given: Given) -> tuple[SequenceOffsets, Modifiers | None]:
    ends = torch.from_numpy(document_ends(documents, len(q))).to(q.device)
    modifiers = None if given.modifiers is None else given.modifiers.of_documents(len(documents))
    return SequenceOffsets(ends, ends, max(documents), max(documents)), modifiers
