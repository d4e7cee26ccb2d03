"""Sums over bits, one tensor at a time."""

from __future__ import annotations

from torch import Tensor

from dash_attn.ledgers.bit_sums import part_sums


def bit_sum(tensor: Tensor) -> int:
    """The sum of one tensor, on the host: this waits for the device."""
    return sum(int(part) for found in part_sums([tensor]) for part in found.sums.tolist()) % 2**64
