"""Ranks inside and outside: neighbours exchange heads for rows, the others pass states on.

P ranks with a factor U are P / U groups of U neighbours. Inside such a group each rank gives up its rows of most heads and gets the
other rows of its own heads. So the group acts as one rank with more rows, and ranks with the same place in their groups share a
sequence of fewer heads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

from ...scheduling.problem import whole_number
from ...scheduling.ranks.sharding import Sharding
from ..peers import Peers
from .rows import by_head, by_row, rows_of

_made: WeakKeyDictionary[ProcessGroup, dict[int, tuple[Peers, Peers]]] = WeakKeyDictionary()


def check_factor(ulysses: int, ranks: int, kv_heads: int) -> None:
    whole_number("ulysses", ulysses)
    if ranks % ulysses:
        raise ValueError(f"ulysses must divide the number of ranks, which is {ranks}; got {ulysses}")
    if kv_heads % ulysses:
        fitting = [factor for factor in range(1, ranks + 1) if ranks % factor == 0 and kv_heads % factor == 0]
        raise ValueError(
            f"ulysses must divide the {kv_heads} KV heads, because ranks get whole KV heads; got {ulysses}. On {ranks} ranks,"
            f" {' and '.join(map(str, fitting))} do"
        )


def inside_and_outside(peers: Peers, ulysses: int) -> tuple[Peers, Peers]:
    """The ranks with which this one exchanges heads, and those with which it shares the sequence of its heads. The groups are made
    once; only their members take part in that."""
    if ulysses == 1 or peers.group is None:
        return Peers.alone(), peers
    if ulysses == peers.count:
        return peers, Peers.alone()
    kept = _made.setdefault(peers.group, {})
    if ulysses not in kept:
        _belong_to_equally_many_groups(peers)
        group, place = divmod(peers.rank, ulysses)
        inside = [group * ulysses + other for other in range(ulysses)]
        outside = [other * ulysses + place for other in range(peers.count // ulysses)]
        kept[ulysses] = _subgroup(peers, inside), _subgroup(peers, outside)
    return kept[ulysses]


def _belong_to_equally_many_groups(peers: Peers) -> None:
    """PyTorch names a group that only its members make after its ranks and the number of groups that a process is in. Members with
    different numbers would wait for each other under different names. So ranks with fewer get groups of their own."""
    mine = len(distributed_c10d._world.pg_names)
    most = max(row[0] for row in peers.hosts.gather([mine]))
    for _ in range(most - mine):
        dist.new_group([dist.get_rank()], backend=dist.get_backend_config(peers.group), use_local_synchronization=True)


def _subgroup(peers: Peers, ranks: list[int]) -> Peers:
    assert peers.group is not None
    everybody = [dist.get_global_rank(peers.group, rank) for rank in ranks]
    limit, backend = peers.time_limit, dist.get_backend_config(peers.group)  # one backend, or one per device
    with peers.reaching(f"make a group of ranks {', '.join(map(str, ranks))} for Ulysses"):
        return Peers.of(dist.new_group(everybody, timeout=limit, backend=backend, use_local_synchronization=True))


def outer_sharding(sharding: Sharding, ulysses: int) -> Sharding:
    """How groups of `ulysses` neighbours share the sequence. Chunks that follow each other and belong to one group are one chunk."""
    owners = [owner // ulysses for owner in sharding.owners]
    starts = [i for i in range(len(owners)) if i == 0 or owners[i] != owners[i - 1]]
    lengths = np.add.reduceat(sharding.lengths, starts).tolist()
    return Sharding(tuple(lengths), tuple(owners[i] for i in starts))


@dataclass(frozen=True)
class HeadExchange:
    """Rows of a rank for heads of a rank, and back, inside of a group of neighbours."""

    inside: Peers
    sharding: Sharding  # of all ranks
    first_rank: int  # of the neighbours, in the whole group

    @cached_property
    def places(self) -> list[Tensor]:
        """Where the rows of each neighbour are among those of all neighbours."""
        rows = [rows_of(self.sharding, self.first_rank + rank, torch.device("cpu")) for rank in range(self.inside.count)]
        everything = torch.cat(rows).sort().values
        return [torch.searchsorted(everything, mine) for mine in rows]

    def heads(self, count: int) -> slice:
        """This rank's share of as many heads."""
        each = count // self.inside.count
        return slice(self.inside.rank * each, (self.inside.rank + 1) * each)

    def to_heads(self, x: Tensor) -> Tensor:
        """(batch, rows of the rank, heads, dim) -> (batch, rows of all neighbours, heads of the rank, dim). An LSE is transposed."""
        if x.ndim == 3:
            return x.contiguous() if self.inside.count == 1 else by_head(self.to_heads(by_row(x)))
        if self.inside.count == 1:
            return x
        pieces = x.chunk(self.inside.count, dim=2)
        shapes = [(len(x), len(places), *pieces[0].shape[2:]) for places in self.places]
        made = x.new_empty(len(x), sum(map(len, self.places)), *pieces[0].shape[2:])
        for places, piece in zip(self.places, self._exchange(pieces, shapes), strict=True):
            made[:, places] = piece
        return made

    def to_rows(self, x: Tensor) -> Tensor:
        """The other way round."""
        if x.ndim == 3:
            return x if self.inside.count == 1 else by_head(self.to_rows(by_row(x)))
        if self.inside.count == 1:
            return x
        pieces = [x[:, places] for places in self.places]
        return torch.cat(self._exchange(pieces, [pieces[self.inside.rank].shape] * len(pieces)), dim=2)

    def _exchange(self, pieces: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """One piece for each neighbour, and one from each."""
        sizes = [math.prod(shape) for shape in shapes]
        found = self.inside.exchange([piece.flatten() for piece in pieces], sizes, "exchange heads for rows")
        return [flat.view(shape) for flat, shape in zip(found, shapes, strict=True)]
