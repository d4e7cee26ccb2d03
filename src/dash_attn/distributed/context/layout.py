"""What a rank has: tokens, labels and positions of a sequence that ranks share, and heads of a model."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ...call.tensor_checks import check_strided
from ...masks import is_whole
from ...scheduling.ranks.sharding import Sharding
from ..hosts import UNSHARD, Facts, agree
from ..peers import Group, Peers
from .mail import gather_rows
from .rows import rows_of, sharding_for, sharding_of_rank


def shard(x: Tensor, group: Group = None, dim: int = 1, *, sharding: str | Sharding = "zigzag") -> Tensor:
    """The part of `x`, which every rank has whole, that belongs to this rank: tokens, labels, position ids, hidden states.

    dim: that of the sequence. sharding: as for context_parallel_attention. Gradients go through it, to the rank's own rows.
    """
    check_dim("x", x, dim)
    peers = Peers.of(group)
    return x.index_select(dim, rows_of(sharding_for(sharding, x.shape[dim], peers.count), peers.rank, x.device))


def unshard(x: Tensor, group: Group = None, dim: int = 1, *, sharding: str | Sharding = "zigzag") -> Tensor:
    """The whole tensor, of which ranks have parts, in the order of the sequence, on every rank. It has no gradient."""
    peers = Peers.of(group)
    chosen = agree(peers.hosts, UNSHARD, lambda: _to_unshard(x, dim, sharding, peers))
    with peers.hosts.telling():
        return gather_rows(peers, chosen, x.movedim(dim, 0)).movedim(0, dim).contiguous()


def _to_unshard(x: Tensor, dim: int, sharding: str | Sharding, peers: Peers) -> tuple[Sharding, Facts]:
    """The sharding that fits this rank's tensor, and what must be the same on every rank."""
    check_dim("x", x, dim)
    check_strided(x=x)
    if x.is_meta:
        raise ValueError("x must have values to send; got a tensor on the meta device")
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("unshard has no gradient, and this tensor requires one: call it under torch.no_grad(), or unshard x.detach()")
    chosen = sharding_of_rank(sharding, x.shape[dim], peers.count)
    mine = len(chosen.rows_of(peers.rank))
    if x.shape[dim] != mine:
        raise ValueError(f"rank {peers.rank} has {mine} of {chosen.rows} rows; got {x.shape[dim]} in dimension {dim} of {tuple(x.shape)}")
    others = tuple(size for place, size in enumerate(x.shape) if place != dim % x.ndim)
    return chosen, {"the dtype": x.dtype, "the sizes of other dimensions": others, "dim": dim % x.ndim, "sharding": chosen}


def positions(seq_len: int, group: Group = None, *, sharding: str | Sharding = "zigzag", device: torch.device | str = "cpu") -> Tensor:
    """The position in the whole sequence of each of this rank's tokens, (seq_len / ranks,): for RoPE and position ids."""
    peers = Peers.of(group)
    return rows_of(sharding_for(sharding, seq_len, peers.count), peers.rank, torch.device(device)).clone()


def check_dim(name: str, x: Tensor, dim: int) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(x).__name__}")
    if not is_whole(dim) or not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim must be one of the {x.ndim} dimensions of {name}; got {dim!r}")


def head_offset(k: Tensor, group: Group = None, *, dim: int = 2) -> int:
    """The index, in the unsharded model, of the first KV head of this rank, for `head_offset` of attention calls.

    k: the keys, whose dimension `dim` is the heads. Of a DTensor, its placement says which heads are here; `group` is not used.
    Of a plain tensor with this rank's heads, the ranks of `group` have equally many heads, in the order of ranks, and none twice.
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
