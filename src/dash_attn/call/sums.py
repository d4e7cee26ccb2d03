"""Sums over the sequences of a batch, whose order is part of the contract."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sum_in_order(parts: Tensor | Sequence[Tensor]) -> Tensor:
    """Of at least one sequence: first to last."""
    total = torch.zeros_like(parts[0])
    for part in parts:
        total += part
    return total
