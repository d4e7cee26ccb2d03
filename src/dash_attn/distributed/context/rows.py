"""Which rows a rank has, and the documents that they belong to: as they were given, checked."""

from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from ...call.options import AttentionOptions, refuse_given_schedule
from ...call.parts import of_a_document, runs_packed
from ...masks import Documents, is_whole
from ...scheduling.json_fields import shortened
from ...scheduling.ranks.sharding import Sharding
from .shared_call import Lengths

Offsets = Tensor | tuple[int, ...] | list[int]


@lru_cache(maxsize=256)
def rows_of(sharding: Sharding, rank: int, where: torch.device) -> Tensor:
    """The places of a rank's rows in the whole sequence, in the order in which it keeps them."""
    return torch.from_numpy(sharding.rows_of(rank).copy()).long().to(where)


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


def documents_in(options: AttentionOptions, cu_seqlens: Offsets | None, rows: int) -> tuple[AttentionOptions, Lengths | None]:
    """The options of one document alone, and the lengths of all; None: the row is one sequence."""
    if cu_seqlens is None:
        options.mask.check(rows, rows)
        if not runs_packed(options):
            return options, None
        assert isinstance(options.mask, Documents)
        return of_a_document(options), options.mask.lengths
    if isinstance(options.mask, Documents):
        raise ValueError("give documents once, as mask=Documents(...) or as cu_seqlens; got both")
    refuse_given_schedule(options)
    if options.dropout_p:
        raise ValueError(
            f"dropout needs a seed for each document, and ranks that share them take one per sequence: dropout_p must be 0 with cu_seqlens;"
            f" got {options.dropout_p!r}. On one rank, flash_attn_varlen_func takes one per document"
        )
    lengths = _lengths(cu_seqlens, rows)
    for length in set(lengths):
        options.mask.check(length, length)
    return options, lengths


def _lengths(cu_seqlens: Offsets, rows: int) -> Lengths:
    """Empty documents are left out."""
    ends = _numbers(cu_seqlens)
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != rows:
        raise ValueError(f"cu_seqlens must begin with 0 and end with the {rows} rows of all ranks together; got {shortened(ends)}")
    for entry, (start, end) in enumerate(pairwise(ends), 1):
        if end < start:
            raise ValueError(f"cu_seqlens must not decrease; got {start} followed by {end} at entry {entry}")
    return tuple(end - start for start, end in pairwise(ends) if end > start)


def _numbers(cu_seqlens: Offsets) -> list[int]:
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.device.type != "cpu":
            raise ValueError(
                f"cu_seqlens must be on the host, because the ranks plan by it; got a tensor on {cu_seqlens.device}. Pass"
                " cu_seqlens.tolist(), made once per batch: it waits for the device"
            )
        if cu_seqlens.ndim != 1 or cu_seqlens.is_floating_point() or cu_seqlens.dtype == torch.bool:
            raise ValueError(f"cu_seqlens must be 1-d, of whole numbers; got {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}")
        return [int(end) for end in cu_seqlens.tolist()]
    if not isinstance(cu_seqlens, (tuple, list)) or not all(map(is_whole, cu_seqlens)):
        raise TypeError(f"cu_seqlens must be a tensor, or a tuple or list of whole numbers; got {shortened(cu_seqlens)}")
    return list(cu_seqlens)
