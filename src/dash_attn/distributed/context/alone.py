"""Attention on a rank that has all rows of its heads: nothing is shared."""

from __future__ import annotations

import torch
from torch import Tensor

from ...attention.autograd import attention_backward, attention_forward
from ...call.documents import backward_of_documents, document_ends, forward_of_documents
from ...call.offsets import SequenceOffsets
from ...call.options import AttentionOptions

Lengths = tuple[int, ...]


def forward_alone(
    tensors: tuple[Tensor, Tensor, Tensor], options: AttentionOptions, documents: Lengths | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output and LSE. Documents in the row are packed sequences."""
    if documents is None:
        return attention_forward(*tensors, options, None, sinks)
    return forward_of_documents(attention_forward, tensors, options, _offsets(tensors[0], documents), sinks)


def backward_alone(
    tensors: tuple[Tensor, ...],
    of_rows: tuple[Tensor, Tensor | None],
    options: AttentionOptions,
    documents: Lengths | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients, of dout, q, k, v and out; of_rows: LSE and its gradient."""
    if documents is None:
        dout, q, k, v, out = tensors
        return attention_backward(dout, q, k, v, out, of_rows[0], options, None, sinks, of_rows[1])
    return backward_of_documents(attention_backward, tensors, of_rows, options, _offsets(tensors[1], documents), sinks)


def _offsets(q: Tensor, documents: Lengths) -> SequenceOffsets:
    ends = torch.from_numpy(document_ends(documents, len(q))).to(q.device)
    return SequenceOffsets(ends, ends, max(documents), max(documents))
