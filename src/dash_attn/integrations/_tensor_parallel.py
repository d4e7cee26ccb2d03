"""Tensor parallelism of transformers (tp_plan): which of the model's KV heads a rank has, so that it keeps the whole model's bits."""

from __future__ import annotations

from typing import Any

from torch import nn

from ._torch_context_parallel import has_placement

KEY_PROJECTIONS = ("k_proj", "kv_b_proj", "key", "qkv_proj", "query_key_value")  # of which the keys' heads are the rows, in order


def first_kv_head(module: nn.Module, kv_heads: int) -> int:
    """The index, in the whole model, of the first KV head of a layer that has `kv_heads` of them here. 0 without a plan."""
    for name in KEY_PROJECTIONS:
        weight: Any = getattr(getattr(module, name, None), "weight", None)
        if weight is not None and has_placement(weight):
            return _first_row(weight) * kv_heads // int(weight.to_local().shape[0])
    return 0


def _first_row(weight: Any) -> int:
    """Of this rank's rows. Every rank has as many as the first, as far as there are some left."""
    first, rows = 0, weight.shape[0]
    for size, place, placement in zip(weight.device_mesh.shape, weight.device_mesh.get_coordinate(), weight.placements, strict=True):
        if placement.is_shard(0):
            rows = -(-rows // size)
            first += place * rows
    return first
