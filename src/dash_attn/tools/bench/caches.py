"""The keys and values of a shape as caches that servers have: rows or pages, in copies that no L2 cache holds together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...masks import Window
from .candidates import Runner, Tensors
from .shape import Shape

L2_BYTES = 200 * 2**20  # several times that of an H200: what is read in turn is read from memory


@dataclass(frozen=True)
class Cache:
    """k and v are (batch, keys, heads, dim) or, with a table, (pages, page size, heads, dim)."""

    k: Tensor
    v: Tensor
    lengths: Tensor  # int32, (batch,)
    table: Tensor | None = None  # int32, (batch, pages of a sequence)


def caches(shape: Shape, tensors: Tensors) -> list[Cache]:
    """As many copies as it takes. On the CPU, where nothing is timed, one."""
    count = 1 if tensors.q.device.type == "cpu" else max(1, -(-L2_BYTES // shape.cache_bytes))
    lengths = torch.full((shape.batch,), shape.seqlen, dtype=torch.int32, device=tensors.k.device)
    if not shape.page_size:
        return [Cache(tensors.k.clone(), tensors.v.clone(), lengths) for _ in range(count)]
    return [_paged(shape, tensors, lengths) for _ in range(count)]


def _paged(shape: Shape, tensors: Tensors, lengths: Tensor) -> Cache:
    columns = -(-shape.seqlen // shape.page_size)
    order = torch.randperm(shape.batch * columns, generator=torch.Generator().manual_seed(0)).to(tensors.k.device)

    def stored(x: Tensor) -> Tensor:
        filled = pad(x, (0, 0, 0, 0, 0, columns * shape.page_size - shape.seqlen))
        pages = filled.reshape(len(order), shape.page_size, *x.shape[2:])
        return torch.empty_like(pages).index_copy_(0, order, pages)

    return Cache(stored(tensors.k), stored(tensors.v), lengths, order.view(shape.batch, columns).int())


def in_turn(calls: Sequence[Callable[[], Tensor]]) -> Runner:
    """A forward that reads the next copy each time. There is no backward."""
    turn = cycle(calls)

    def forward() -> Tensor:
        with torch.no_grad():
            return next(turn)()

    def backward() -> Any:
        raise NotImplementedError("attention to a cache has no backward")

    return Runner(forward, backward)


def window_of(shape: Shape, unlimited: int | None = -1) -> tuple[int | None, int | None]:
    """Keys before and after a query."""
    mask = shape.attended
    sides = (mask.left, mask.right) if isinstance(mask, Window) else (-1, -1)
    return sides[0] if sides[0] >= 0 else unlimited, sides[1] if sides[1] >= 0 else unlimited
