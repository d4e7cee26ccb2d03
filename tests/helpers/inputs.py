"""The inputs of every test of accuracy or bits: standard normal, the same in every run."""

from __future__ import annotations

import torch
from torch import Tensor

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def make_inputs(
    device: str | torch.device,
    lengths: tuple[int, int],
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (128, 0),
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 1,
    seed: int = 0,
    drawn: torch.dtype = torch.float32,
) -> Inputs:
    """q, k, v and dO. `lengths` and `heads` are those of queries and of keys; `dims` those of q and k, and of v and dO (0: the same).

    `drawn` is the dtype before they are rounded to `dtype`.
    """
    source = torch.Generator(device).manual_seed(seed)
    (q_len, kv_len), (q_heads, kv_heads), dim, v_dim = lengths, heads, dims[0], dims[1] or dims[0]
    shapes = [(q_len, q_heads, dim), (kv_len, kv_heads, dim), (kv_len, kv_heads, v_dim), (q_len, q_heads, v_dim)]
    q, k, v, dout = (torch.randn((batch, *shape), generator=source, device=device, dtype=drawn).to(dtype) for shape in shapes)
    return q, k, v, dout
