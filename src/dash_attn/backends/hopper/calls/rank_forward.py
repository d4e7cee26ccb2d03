"""The forward of one of several ranks that share a sequence: chunk by chunk, each a call of its own with the bits of the whole."""

from __future__ import annotations

from dataclasses import replace

import torch

from ....call.call import Call, Saved
from ....scheduling.ranks.sharding import Sharding
from ..support import refuse_modifiers
from .forward import forward as forward_of_batch
from .rank_masks import check_mask, mask_of_rows


def forward(call: Call, sharding: Sharding, rank: int) -> Saved:
    """Of the rank's queries; k and v are those of the whole sequence."""
    (q, k, v), options = call.tensors, call.options
    check_mask(options.mask)
    refuse_modifiers(options, "ranks that share a sequence")
    outs, begin = [], 0
    for chunk in sharding.chunks_of(rank):
        rows = sharding.rows_of_chunk(chunk)
        mask, keys = mask_of_rows(options.mask, rows, sharding.rows)
        own = replace(options, mask=mask, schedule="auto")  # a forward needs no schedule
        outs.append(forward_of_batch(Call(q[:, begin : begin + len(rows)], k[:, :keys], v[:, :keys], own, sinks=call.sinks)))
        begin += len(rows)
    if len(outs) == 1:
        return outs[0]
    return Saved(torch.cat([out for out, _ in outs], dim=1), torch.cat([lse for _, lse in outs], dim=2))
