"""A forward of few queries on many keys. The kernel for caches runs it: it reads K and V once for all query heads of a group, where the
kernel for whole sequences fills tiles of 128 queries. The bits are the same.
"""

import threading
from functools import cache

import numpy as np
import torch
from torch import Tensor

from ....call.call import Call, Saved, cut
from ....call.kv_cache import CacheCall
from ....call.offsets import SequenceOffsets
from ....call.options import AttentionOptions
from ...kept import upload
from ..driver.launch import current_stream, on_device
from ..driver.workspace import Workspace
from .decode import DecodeCall
from .layout import Layout, PreparedForward
from .packed import SequenceLayout, sequence_sizes
from .tables import mask_on_device


def as_cache(call: Call, layout: Layout, row: Tensor | None) -> CacheCall:
    """Packed keys are one row of a cache, in which each sequence has its stretch. row: its number, for each sequence."""
    q, k, v, options, offsets, sinks, _ = call
    if offsets is None:
        return CacheCall(q, k, v, options, sinks=sinks, cache_seqlens=layout.kv_len)
    ends = offsets.cu_seqlens_k
    return CacheCall(
        *(q, k[None], v[None], options),
        sinks=sinks,
        cache_seqlens=ends[1:],
        cache_leftpad=ends[:-1],
        cache_batch_idx=row,
        offsets=SequenceOffsets.known(offsets.cu_seqlens_q, ends, *layout.longest),
    )


@cache
def _first_row(count: int, device: torch.device) -> Tensor:
    """Of a cache, for each sequence. A few bytes that stay for good: launches on any stream read them, and nobody waits to let them go."""
    return upload(np.zeros(count, dtype=np.int32), device)


class FewQueries(PreparedForward):
    """Everything about a call that does not change with the addresses of its tensors."""

    holds_tables = False

    def __init__(self, layout: Layout, tensors: tuple[Tensor, ...], options: AttentionOptions, tile: tuple[int, int]) -> None:
        """tile: rows of the forward's, for which there is a kernel that looks at cu_seqlens."""
        self.layout, self.device, self.lock = layout, tensors[0].device, threading.Lock()
        self.decode: DecodeCall | None = None  # made by the first call, which has offsets
        self.row: Tensor | None = None
        if layout.packed:
            self.row = _first_row(layout.count, self.device)
            mask = mask_on_device(options.mask, layout.q_len, layout.kv_len, self.device)
            self.lengths = SequenceLayout(layout, mask, tile)
            self.workspace = Workspace(next_ticket=8, **sequence_sizes(layout))

    def run(self, tensors: tuple[Tensor, ...], call: Call) -> Saved:
        q, k, v = tensors
        cache = as_cache(call._replace(q=q, k=k, v=v), self.layout, self.row)
        with on_device(self.layout.device), self.lock:
            if call.offsets is not None:  # a sequence that is not one would leave rows unwritten
                memory, at = self.workspace.allocate(self.device)
                self.lengths.work_in(at)
                self.lengths.launch(call.offsets, current_stream(self.layout.device))
                del memory  # stream order keeps it alive long enough
            if self.decode is None:
                self.decode = DecodeCall(cache)
        out, lse = self.decode.run(cache)
        return Saved(cut(out, self.layout.v_dim), lse)
