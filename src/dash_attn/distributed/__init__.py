"""Training on several ranks of torch.distributed with the bits of one. It is imported only where it is used."""

from __future__ import annotations

from .accumulator import TreeAccumulator
from .sampler import MicroBatchSampler

__all__ = ["MicroBatchSampler", "TreeAccumulator"]
