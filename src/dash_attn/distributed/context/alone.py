"""Attention on a rank that has all rows of its heads: nothing is shared."""

from __future__ import annotations

import torch
from torch import Tensor

from ...attention.autograd import attention_backward, attention_forward
from ...call.call import Call, Gradients, Grads, Saved
from ...call.offsets import SequenceOffsets
from ...call.parts import backward_end_to_end, document_ends, end_to_end, in_rows

Lengths = tuple[int, ...]


def forward_alone(call: Call, documents: Lengths | None) -> Saved:
    """Documents in the row are packed sequences."""
    if documents is None:
        return attention_forward(call)
    return in_rows(attention_forward(end_to_end(call, call.options, _offsets(call.q, documents))), call)


def backward_alone(call: Call, saved: Saved, grads: Grads, documents: Lengths | None) -> Gradients:
    if documents is None:
        return attention_backward(call, saved, grads)
    packed = end_to_end(call, call.options, _offsets(call.q, documents))
    return backward_end_to_end(attention_backward, packed, saved, grads)


def _offsets(q: Tensor, documents: Lengths) -> SequenceOffsets:
    ends = torch.from_numpy(document_ends(documents, len(q))).to(q.device)
    return SequenceOffsets(ends, ends, max(documents), max(documents))
