"""Documents in a row run as packed sequences: the kernels mask them by arithmetic, and plan them on the device however often the
lengths change.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....call.documents import backward_of_documents, document_ends, forward_of_documents, runs_packed
from ....call.modifiers import Modifiers
from ....call.offsets import SequenceOffsets
from ....call.options import AttentionOptions
from ....masks import Documents
from ..device.recently_used import Kept
from .backward import backward as backward_of_batch
from .forward import forward as forward_of_batch
from .masks_per_head import backward as backward_of_dense
from .masks_per_head import forward as forward_of_dense
from .tables import upload

MOST_OFFSETS = 64


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


def offsets_of(q: Tensor, options: AttentionOptions) -> SequenceOffsets:
    """Where the documents of all sequences begin and end. New lengths are uploaded to a GPU, for which the host waits;
    flash_attn_varlen_func takes lengths that are on the device already.
    """
    assert isinstance(options.mask, Documents)
    lengths, batch = options.mask.lengths, q.shape[0]
    return recent_offsets(lengths, batch, q.device) if q.is_cuda else make_offsets(lengths, batch, q.device)


def make_offsets(lengths: tuple[int, ...], batch: int, device: torch.device) -> SequenceOffsets:
    on_host = document_ends(lengths, batch)
    ends = upload(on_host, device) if device.type == "cuda" else torch.from_numpy(on_host).to(device)
    # Room for a longer document changes no bit, but other lengths then find the same prepared call.
    longest = min(sum(lengths), 1 << (max(lengths) - 1).bit_length())
    return SequenceOffsets(ends, ends, longest, longest)


_kept: Kept[SequenceOffsets] = Kept(MOST_OFFSETS)


def recent_offsets(lengths: tuple[int, ...], batch: int, device: torch.device) -> SequenceOffsets:
    key = (lengths, batch, device)
    offsets = _kept.get(key)
    if offsets is None:
        offsets = make_offsets(lengths, batch, device)
        _kept.put(key, offsets)
    if not torch.cuda.is_current_stream_capturing():  # its memory is not used again before this stream is through with it
        offsets.cu_seqlens_q.record_stream(torch.cuda.current_stream(device))
    return offsets
