"""Runs a call on its backend. What every backend would do alike is done here: documents in a row, and masks that differ between heads."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..call.call import Call, Gradients, Grads, Saved, backward_of_nothing, forward_of_nothing, no_pairs
from ..call.offsets import SequenceOffsets
from ..call.parts import (
    backward_end_to_end,
    backward_per_head,
    end_to_end,
    forward_per_head,
    in_rows,
    of_a_document,
    offsets_of_documents,
    runs_packed,
)
from ..masks import Documents, PatternPerHead
from . import Backend, Prepared, backend_for
from .kept import Kept, refuse_capture_of, upload

MOST_OFFSETS = 64


def forward(call: Call) -> Saved:
    backend = backend_for(call.options.backend, call.q.device)
    if no_pairs(call):
        if call.offsets is not None and call.q.is_cpu:
            call.offsets.sequences(len(call.q), len(call.k))  # no backend looks at the lengths
        return forward_of_nothing(call)
    if call.offsets is None:
        if isinstance(call.options.mask, Documents) and runs_packed(call.options):
            return in_rows(backend.forward(as_packed(call)), call)
        if isinstance(call.options.mask, PatternPerHead) and not backend.HEADS_AT_ONCE:
            _check_capture(call)
            return forward_per_head(partial(_forward, backend), call)
    return _forward(backend, call)


def _forward(backend: Backend, call: Call) -> Saved:
    if call.options.gives_schedule:
        backend.check_schedule(call)  # a backward would find too late that it does not fit
    return backend.forward(call)


def prepared(call: Call, *of_backward: Any) -> Callable[[], Prepared | None] | None:
    """What the backend keeps for calls like this one, where it runs them whole and has nothing more to check."""
    options = call.options
    splits = isinstance(options.mask, (Documents, PatternPerHead)) or options.gives_schedule or no_pairs(call)
    return None if splits else backend_for(options.backend, call.q.device).prepared(call, *of_backward)


def backward(call: Call, saved: Saved, grads: Grads) -> Gradients:
    backend = backend_for(call.options.backend, call.q.device)
    if no_pairs(call):
        return backward_of_nothing(call, grads)
    if call.offsets is None:
        if isinstance(call.options.mask, Documents) and runs_packed(call.options):
            return backward_end_to_end(backend.backward, as_packed(call), saved, grads)
        if isinstance(call.options.mask, PatternPerHead) and not backend.HEADS_AT_ONCE:
            _check_capture(call)
            return backward_per_head(backend.backward, call, saved, grads, backend.EXACT_PARTS)
    return backend.backward(call, saved, grads)


def as_packed(call: Call) -> Call:
    """Documents in a row as packed sequences."""
    return end_to_end(call, of_a_document(call.options), document_offsets(call))


def document_offsets(call: Call) -> SequenceOffsets:
    """Of all sequences. New lengths are uploaded to a GPU, for which the host waits; flash_attn_varlen_func takes lengths that are on the
    device already. Steps come back to the same lengths, so they are kept there.
    """
    assert isinstance(call.options.mask, Documents)
    lengths, batch, device = call.options.mask.lengths, len(call.q), call.q.device
    if device.type != "cuda":
        return offsets_of_documents(lengths, batch, device)
    offsets = _kept.find((lengths, batch, device), lambda: offsets_of_documents(lengths, batch, device, upload))
    if not torch.cuda.is_current_stream_capturing():  # its memory is not used again before this stream is through with it
        offsets.cu_seqlens_q.record_stream(torch.cuda.current_stream(device))
    return offsets


def _check_capture(call: Call) -> None:
    if call.q.is_cuda:
        refuse_capture_of(call.elements or call.options.mask)


_kept: Kept[SequenceOffsets] = Kept(MOST_OFFSETS)
