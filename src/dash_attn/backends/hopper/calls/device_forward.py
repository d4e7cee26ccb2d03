"""The forward of one of several devices that share a sequence: chunk by chunk, each a call of its own with the bits of the whole."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ....call.options import AttentionOptions
from ....masks import Causal, Full, Mask, Window
from ....scheduling.devices.sharding import Sharding
from .forward import forward as forward_of_batch
from .leg_tables import check_mask


def forward(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, sinks: Tensor | None, sharding: Sharding, device: int
) -> tuple[Tensor, Tensor]:
    """Output and LSE of the device's queries; k and v are those of the whole sequence."""
    check_mask(options.mask)
    outs, begin = [], 0
    for chunk in sharding.chunks_of(device):
        rows = sharding.rows_of_chunk(chunk)
        mask, keys = mask_of_rows(options.mask, rows, sharding.rows)
        own = replace(options, mask=mask, schedule="auto")  # a forward needs no schedule
        outs.append(forward_of_batch(q[:, begin : begin + len(rows)], k[:, :keys], v[:, :keys], own, None, sinks))
        begin += len(rows)
    if len(outs) == 1:
        return outs[0]
    return torch.cat([out for out, _ in outs], dim=1), torch.cat([lse for _, lse in outs], dim=2)


def mask_of_rows(mask: Mask, rows: range, length: int) -> tuple[Mask, int]:
    """The mask of some queries of a sequence, and how many keys it is for: the last query of a call is aligned with its last key.

    A key that no row attends changes no bit, so the keys may end anywhere behind the last one that does.
    """
    if isinstance(mask, Full):
        return mask, length
    if isinstance(mask, Causal):
        return mask, rows.stop
    assert isinstance(mask, Window)
    keys = length if mask.right < 0 else min(length, rows.stop + mask.right)
    ahead = keys - rows.stop
    left, right = (-1 if mask.left < 0 else mask.left + ahead), (-1 if mask.right < 0 else mask.right - ahead)
    return Window(left, right), keys
