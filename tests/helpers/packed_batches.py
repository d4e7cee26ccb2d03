"""Packed batches on either device: sequences laid end to end, run once, and the results cut apart again."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dash_attn import Mask, flash_attn_varlen_func
from dense import Results
from inputs import Inputs, make_inputs

Lengths = tuple[tuple[int, int], ...]  # (queries, keys) of each sequence


def make_parts(device: str, lengths: Lengths, heads: tuple[int, int] = (4, 2), dim: int = 128, seed: int = 0, **rest: Any) -> list[Inputs]:
    """A sequence's numbers depend on its place in `lengths` and the seed."""
    return [make_inputs(device, pair, heads, (dim, 0), seed=1000 * seed + i, **rest) for i, pair in enumerate(lengths)]


def places(lengths: list[int], device: str | torch.device) -> Tensor:
    """Where sequences start and end, as flash_attn_varlen_func takes them."""
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=device)


def pack(parts: list[Inputs]) -> Inputs:
    q, k, v, dout = (torch.cat([part[i][0] for part in parts]) for i in range(4))
    return q, k, v, dout


def run_packed(parts: list[Inputs], mask: Mask, room: int = 0, **options: Any) -> list[Results]:
    """Results of each sequence, as flash_attn_func gives them. `room` is added to the longest lengths."""
    q, k, v, dout = pack(parts)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    q_lengths, kv_lengths = ([part[i].shape[1] for part in parts] for i in (0, 1))
    longest = max(q_lengths) + room, max(kv_lengths) + room
    arguments = (places(q_lengths, q.device), places(kv_lengths, q.device), *longest)
    out, lse = flash_attn_varlen_func(*leaves, *arguments, mask=mask, return_lse=True, **options)
    gradients = torch.autograd.grad(out, leaves, dout)
    by_token = zip((out.detach(), *gradients), (q_lengths, q_lengths, kv_lengths, kv_lengths), strict=True)
    out_parts, *gradient_parts = (x.split(lengths) for x, lengths in by_token)
    return [
        Results(one_out[None], one_lse[None], *(gradient[None] for gradient in one))
        for one_out, one_lse, *one in zip(out_parts, lse.detach().split(q_lengths, 1), *gradient_parts, strict=True)
    ]
