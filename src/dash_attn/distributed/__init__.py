"""Training on several ranks of torch.distributed with the bits of one. It is imported only where it is used."""

from ..scheduling.ranks.sharding import Sharding
from .context.attention import context_parallel_attention
from .context.explain import SharedExplanation
from .context.layout import head_offset, positions, shard, unshard
from .micro_batches.accumulator import TreeAccumulator
from .micro_batches.sampler import MicroBatchSampler

__all__ = [
    "MicroBatchSampler",
    "Sharding",
    "SharedExplanation",
    "TreeAccumulator",
    "context_parallel_attention",
    "head_offset",
    "positions",
    "shard",
    "unshard",
]
