"""Where documents in a row begin and end, in a GPU's memory. Steps come back to the same lengths, so they are kept."""

from __future__ import annotations

import torch
from torch import Tensor

from ..call.documents import offsets_of_documents
from ..call.offsets import SequenceOffsets
from ..call.options import AttentionOptions
from ..masks import Documents
from .recently_used import Kept
from .uploading import upload

MOST_OFFSETS = 64


def offsets_of(q: Tensor, options: AttentionOptions) -> SequenceOffsets:
    """Of all sequences. New lengths are uploaded to a GPU, for which the host waits; flash_attn_varlen_func takes lengths that are on
    the device already.
    """
    assert isinstance(options.mask, Documents)
    lengths, batch = options.mask.lengths, q.shape[0]
    return recent_offsets(lengths, batch, q.device) if q.is_cuda else offsets_of_documents(lengths, batch, q.device)


_kept: Kept[SequenceOffsets] = Kept(MOST_OFFSETS)


def recent_offsets(lengths: tuple[int, ...], batch: int, device: torch.device) -> SequenceOffsets:
    offsets = _kept.find((lengths, batch, device), lambda: offsets_of_documents(lengths, batch, device, upload))
    if not torch.cuda.is_current_stream_capturing():  # its memory is not used again before this stream is through with it
        offsets.cu_seqlens_q.record_stream(torch.cuda.current_stream(device))
    return offsets
