"""Documents in a row run as packed sequences: the kernels mask them by arithmetic, and plan them on the device however often the
lengths change.
"""

from __future__ import annotations

from torch import Tensor

from ....call.documents import backward_of_documents, forward_of_documents, runs_packed
from ....call.modifiers import Modifiers
from ....call.offsets import SequenceOffsets
from ....call.options import AttentionOptions
from ...document_offsets import offsets_of
from .backward import backward as backward_of_batch
from .forward import forward as forward_of_batch
from .masks_per_head import backward as backward_of_dense
from .masks_per_head import forward as forward_of_dense


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    offsets: SequenceOffsets | None = None,
    sinks: Tensor | None = None,
    modifiers: Modifiers | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and LSE."""
    if offsets is None and not runs_packed(options):
        return forward_of_dense(q, k, v, options, sinks, modifiers)
    if offsets is not None:
        return forward_of_batch(q, k, v, options, offsets, sinks, modifiers)
    return forward_of_documents(forward_of_batch, (q, k, v), options, offsets_of(q, options), sinks, modifiers)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dQ, dK, dV and the gradient of the sinks."""
    tensors = dout, q, k, v, out
    if offsets is None and not runs_packed(options):
        return backward_of_dense(tensors, (lse, dlse), options, sinks, modifiers)
    if offsets is not None:
        return backward_of_batch(dout, q, k, v, out, lse, options, offsets, sinks, dlse, modifiers)
    return backward_of_documents(backward_of_batch, tensors, (lse, dlse), options, offsets_of(q, options), sinks, modifiers)
