"""Documents in a row are packed sequences: the kernels mask them by arithmetic, plan them on the device however often the
lengths change, and give each document the bits it has alone. Only a schedule that is asked for by name needs the whole mask.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ...masks import Causal, Documents, Full
from ...options import AttentionOptions
from ...packing import Packing
from .backward import backward as backward_of_batch
from .forward import forward as forward_of_batch
from .kept import Kept
from .tables import upload

MOST_PACKINGS = 64


def runs_packed(options: AttentionOptions) -> bool:
    return isinstance(options.mask, Documents) and options.schedule == "auto"


def forward(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, packing: Packing | None = None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output and LSE."""
    if packing is not None or not runs_packed(options):
        return forward_of_batch(q, k, v, options, packing, sinks)
    batch, length, heads, _ = q.shape
    packed_q, packed_k, packed_v = (laid_end_to_end(x) for x in (q, k, v))
    out, lse = forward_of_batch(packed_q, packed_k, packed_v, of_a_document(options), packing_of(q, options), sinks)
    return out.unflatten(0, (batch, length)), lse.view(heads, batch, length).transpose(0, 1).contiguous()


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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dQ, dK, dV and the gradient of the sinks."""
    if packing is not None or not runs_packed(options):
        return backward_of_batch(dout, q, k, v, out, lse, options, packing, sinks)
    packed_dout, packed_q, packed_k, packed_v, packed_out = (laid_end_to_end(x) for x in (dout, q, k, v, out))
    packed_lse = lse.transpose(0, 1).reshape(q.shape[2], -1)
    alone, places = of_a_document(options), packing_of(q, options)
    dq, dk, dv, dsinks = backward_of_batch(packed_dout, packed_q, packed_k, packed_v, packed_out, packed_lse, alone, places, sinks)
    rows = q.shape[:2]
    return dq.unflatten(0, rows), dk.unflatten(0, rows), dv.unflatten(0, rows), dsinks


@lru_cache(maxsize=64)
def of_a_document(options: AttentionOptions) -> AttentionOptions:
    """The options of one document alone."""
    assert isinstance(options.mask, Documents)
    return replace(options, mask=Causal() if options.mask.causal else Full())


def packing_of(q: Tensor, options: AttentionOptions) -> Packing:
    """Where the documents of all sequences begin and end. New lengths are uploaded to a GPU, for which the host waits;
    flash_attn_varlen_func takes lengths that are on the device already.
    """
    assert isinstance(options.mask, Documents)
    lengths, batch = options.mask.lengths, q.shape[0]
    return kept_packing(lengths, batch, q.device) if q.is_cuda else make_packing(lengths, batch, q.device)


def make_packing(lengths: tuple[int, ...], batch: int, device: torch.device) -> Packing:
    ends = np.array([0, *accumulate(lengths * batch)], dtype=np.int32)
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


def laid_end_to_end(x: Tensor) -> Tensor:
    """(batch x length, heads, head dim): a view where the sequences follow each other in memory, else a copy."""
    return x.flatten(0, 1)
