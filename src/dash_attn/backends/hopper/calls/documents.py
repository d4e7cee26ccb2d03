"""Documents in a row run as packed sequences: the kernels mask them by arithmetic, and plan them on the device however often the
lengths change.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....call.documents import backward_of_documents, document_ends, forward_of_documents, runs_packed
from ....call.offsets import Packing
from ....call.options import AttentionOptions
from ....masks import Documents
from ..device.recently_used import Kept
from .backward import backward as backward_of_batch
from .forward import forward as forward_of_batch
from .tables import upload

MOST_PACKINGS = 64


def forward(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, packing: Packing | None = None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output and LSE."""
    if packing is not None or not runs_packed(options):
        return forward_of_batch(q, k, v, options, packing, sinks)
    return forward_of_documents(forward_of_batch, (q, k, v), options, packing_of(q, options), sinks)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: AttentionOptions,
    packing: Packing | None = None,
    sinks: Tensor | None = None,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dQ, dK, dV and the gradient of the sinks."""
    if packing is not None or not runs_packed(options):
        return backward_of_batch(dout, q, k, v, out, lse, options, packing, sinks, dlse)
    return backward_of_documents(backward_of_batch, (dout, q, k, v, out), (lse, dlse), options, packing_of(q, options), sinks)


def packing_of(q: Tensor, options: AttentionOptions) -> Packing:
    """Where the documents of all sequences begin and end. New lengths are uploaded to a GPU, for which the host waits;
    flash_attn_varlen_func takes lengths that are on the device already.
    """
    assert isinstance(options.mask, Documents)
    lengths, batch = options.mask.lengths, q.shape[0]
    return kept_packing(lengths, batch, q.device) if q.is_cuda else make_packing(lengths, batch, q.device)


def make_packing(lengths: tuple[int, ...], batch: int, device: torch.device) -> Packing:
    ends = document_ends(lengths, batch)
    places = upload(ends, device) if device.type == "cuda" else torch.from_numpy(ends).to(device)
    # Room for a longer document changes no bit, but other lengths then find the same prepared call.
    longest = min(sum(lengths), 1 << (max(lengths) - 1).bit_length())
    return Packing(places, places, longest, longest)


_kept: Kept[Packing] = Kept(MOST_PACKINGS)


def kept_packing(lengths: tuple[int, ...], batch: int, device: torch.device) -> Packing:
    key = (lengths, batch, device)
    packing = _kept.get(key)
    if packing is None:
        packing = make_packing(lengths, batch, device)
        _kept.put(key, packing)
    if not torch.cuda.is_current_stream_capturing():  # its memory is not used again before this stream is through with it
        packing.cu_seqlens_q.record_stream(torch.cuda.current_stream(device))
    return packing
