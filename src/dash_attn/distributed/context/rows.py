"""The rows of a rank, as indices."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ...scheduling.ranks.sharding import Sharding


@lru_cache(maxsize=256)
def rows_of(sharding: Sharding, device: int, where: torch.device) -> Tensor:
    """The places of a rank's rows in the whole sequence, in the order in which it keeps them."""
    return torch.from_numpy(sharding.rows_of(device).copy()).long().to(where)


def sharding_for(name: str | Sharding, rows: int, ranks: int) -> Sharding:
    """By name, or the one given, for as many rows and ranks."""
    if not isinstance(name, Sharding):
        if not isinstance(name, str):
            raise TypeError(f"sharding must be a name or a Sharding; got {type(name).__name__}")
        return Sharding.named(name, rows, ranks)
    if name.ranks != ranks:
        raise ValueError(f"the sharding that was given is for {name.ranks} ranks; the group has {ranks}")
    if name.rows != rows:
        raise ValueError(f"the sharding that was given is for {name.rows} rows; got {rows}")
    return name


def sharding_of_rank(name: str | Sharding, rows: int, ranks: int) -> Sharding:
    """The same, where a rank knows how many rows it has itself: chunks of a sharding by name have one length."""
    return sharding_for(name, name.rows if isinstance(name, Sharding) else rows * ranks, ranks)


def by_row(x: Tensor) -> Tensor:
    """(batch, heads, rows) -> (batch, rows, heads, 1)."""
    return x.transpose(1, 2)[..., None].contiguous()


def by_head(x: Tensor) -> Tensor:
    """(batch, rows, heads, 1) -> (batch, heads, rows)."""
    return x[..., 0].transpose(1, 2).contiguous()
