"""Which heads of the model a tensor-parallel rank has."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .context.layout import check_dim
from .peers import Group, Peers


def head_offset(k: Tensor, group: Group = None, *, dim: int = 2) -> int:
    """The index, in the unsharded model, of the first KV head of this rank: what `head_offset` of attention calls wants.

    k: the keys, whose dimension `dim` is the heads. Of a DTensor, its placement says which heads are here; `group` is not used.
    Of a plain tensor with this rank's heads, the ranks of `group` have as many heads each, in the order of ranks, and no head twice.
    """
    check_dim("k", k, dim)
    if isinstance(k, DTensor):
        return _from_placement(k, dim % k.ndim)
    return Peers.of(group).rank * k.shape[dim]


def _from_placement(k: DTensor, dim: int) -> int:
    """A mesh dimension that shards the heads deals what the dimensions before it left, in pieces of one size; the last may be shorter."""
    coordinate = k.device_mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("this process is not part of the mesh of k")
    first, heads = 0, k.shape[dim]
    for place, size, placement in zip(coordinate, k.device_mesh.shape, k.placements, strict=True):
        if isinstance(placement, Partial) or not isinstance(placement, (Replicate, Shard)):
            raise ValueError(f"the heads that a rank has are known of Shard and Replicate; k has {placement}")
        if not isinstance(placement, Shard) or placement.dim % k.ndim != dim:
            continue
        each = -(-heads // size)
        begin = min(place * each, heads)
        first, heads = first + begin, min(each, heads - begin)
    if heads == 0:
        raise ValueError(f"this rank has none of the {k.shape[dim]} heads of k")
    return first
