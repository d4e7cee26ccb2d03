"""How many rows a sum must come with, and how tensors are laid out so that rows are all alike."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

# With fewer rows PyTorch or cuBLAS takes another kernel. Below 16 rows PyTorch's reductions give a row more threads.
OF_PRODUCTS, OF_NORMS = 2, 16
BLOCK = 32  # rows of every product, where products are computed in blocks
ALIGNMENT = {"cuda": 256}  # bytes: libraries choose their kernels by it, too; PyTorch tells cuBLASLt of 256 at most


def as_rows(x: Tensor) -> Tensor:
    """Of the last dimension, one behind the other, aligned."""
    rows = x.reshape(-1, x.shape[-1])
    return aligned(rows) if rows.is_contiguous() else rows.clone(memory_format=torch.contiguous_format)


def aligned(x: Tensor) -> Tensor:
    """With its strides."""
    return x if is_aligned(x) else x.clone()


def is_aligned(x: Tensor) -> bool:
    return x.data_ptr() % ALIGNMENT.get(x.device.type, 64) == 0


def on_gpu(x: Tensor) -> bool:
    """Where products and norms are probed."""
    return x.is_cuda


def at_least(fewest: int, rows: Tensor) -> Tensor:
    """These rows; if they are fewer, again until there are exactly as many."""
    whole, rest = divmod(fewest, len(rows))
    return rows if len(rows) >= fewest else torch.cat([rows] * whole + [rows[:rest]] * (rest > 0))


def in_blocks(compute: Callable[[Tensor], Tensor], rows: Tensor, block: int = BLOCK) -> Tensor:
    """By calls of one size each, so that all rows are summed alike."""
    *whole, last = [compute(part) for part in pad(rows, (0, 0, 0, -len(rows) % block)).split(block)]
    return torch.cat([*whole, last[: len(rows) - len(whole) * block]])  # no view, so that it can be changed in place
