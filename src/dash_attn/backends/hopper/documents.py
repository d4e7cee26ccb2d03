"""Documents in a row are packed sequences: the kernels mask them by arithmetic, plan them on the device however often the
lengths change, and give each document the bits it has alone. Only a schedule that is asked for by name needs the whole mask.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...masks import Causal, Documents, Full
from ...options import AttentionOptions
from ...packing import Packing
from .backward import backward as backward_of_batch
from .forward import forward as forward_of_batch
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
    packed_q, packed_k, packed_v = (_laid_end_to_end(x) for x in (q, k, v))
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
    packed_dout, packed_q, packed_k, packed_v, packed_out = (_laid_end_to_end(x) for x in (dout, q, k, v, out))
    packed_lse = lse.transpose(0, 1).reshape(q.shape[2], -1)
    alone, places = of_a_document(options), packing_of(q, options)
    *gradients, dsinks = backward_of_batch(packed_dout, packed_q, packed_k, packed_v, packed_out, packed_lse, alone, places, sinks)
    dq, dk, dv = (x.unflatten(0, q.shape[:2]) for x in gradients if x is not None)
    return dq, dk, dv, dsinks


@lru_cache(maxsize=64)
def of_a_document(options: AttentionOptions) -> AttentionOptions:
    """The options of one document alone."""
    assert isinstance(options.mask, Documents)
    return replace(options, mask=Causal() if options.mask.causal else Full())


def packing_of(q: Tensor, options: AttentionOptions) -> Packing:
    """Where the documents of all sequences begin and end."""
    assert isinstance(options.mask, Documents)
    lengths, batch = options.mask.lengths, q.shape[0]
    return _packings.find(lengths, batch, q.device) if q.is_cuda else make_packing(lengths, batch, q.device)


def make_packing(lengths: tuple[int, ...], batch: int, device: torch.device) -> Packing:
    ends = np.array([0, *accumulate(lengths * batch)], dtype=np.int32)
    places = upload(ends, device) if device.type == "cuda" else torch.from_numpy(ends).to(device)
    # Room for a longer document changes no bit, but other lengths then find the same prepared call.
    longest = min(sum(lengths), 1 << (max(lengths) - 1).bit_length())
    return Packing(places, places, longest, longest)


class Packings:
    """Those of the last calls, on the GPU. New lengths are uploaded, for which the host waits; flash_attn_varlen_func takes
    lengths that are on the device already.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[Any, Packing] = OrderedDict()  # least recently used first
        self._in_graphs: list[Packing] = []  # a graph holds addresses, but no tensors
        self._lock = threading.Lock()

    def find(self, lengths: tuple[int, ...], batch: int, device: torch.device) -> Packing:
        key = (lengths, batch, device)
        with self._lock:
            packing = self._known.get(key)
            if packing is None:
                packing = self._known[key] = make_packing(lengths, batch, device)
            self._known.move_to_end(key)
            if len(self._known) > MOST_PACKINGS:
                self._known.popitem(last=False)
            if torch.cuda.is_current_stream_capturing():
                self._in_graphs.append(packing)
            else:  # its memory is not used again before this stream is through with it
                packing.cu_seqlens_q.record_stream(torch.cuda.current_stream(device))
        return packing


_packings = Packings()


def _laid_end_to_end(x: Tensor) -> Tensor:
    """(batch x length, heads, head dim): a view where the sequences follow each other in memory, else a copy."""
    return x.flatten(0, 1)
