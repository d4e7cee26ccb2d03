"""Boolean matrices that tests attend with: of all sorts, non-square, with empty rows and columns."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Drawn(NamedTuple):
    lengths: tuple[int, int]
    heads: tuple[int, int]  # of queries, and of keys
    batch: int
    mask: Tensor

    def __str__(self) -> str:
        return f"{tuple(self.mask.shape)}, heads {self.heads}, batch {self.batch}"


HEADS = ((2, 2), (4, 2), (3, 1), (1, 1))


def draw(number: int) -> Drawn:
    """The same for the same number."""
    source = torch.Generator().manual_seed(number)

    def whole(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=source))

    lengths, heads, batch = (whole(1, 330), whole(1, 400)), HEADS[whole(0, len(HEADS) - 1)], whole(1, 2)
    leading = ((), (1, 1), (batch, 1), (1, heads[0]), (batch, heads[0]), (heads[0],))[number % 6]
    mask = torch.empty(*leading, *lengths, dtype=torch.bool)
    for one in mask.view(-1, *lengths):
        one.copy_(SORTS[whole(0, len(SORTS) - 1)](lengths, source))
        _empty_some(one, source)
    return Drawn(lengths, heads, batch, mask)


def _empty_some(one: Tensor, source: torch.Generator) -> None:
    """Single rows and columns, and stretches that empty whole tiles."""
    for dimension in (0, 1):
        length = one.shape[dimension]
        start, choice = (int(torch.randint(0, most, (), generator=source)) for most in (length, 4))
        empty = (slice(start, start + (0, 1, 70, 200)[choice]),)
        one[(slice(None),) * dimension + empty] = False


def scattered(lengths: tuple[int, int], source: torch.Generator) -> Tensor:
    """Elements, few to nearly all."""
    density = (0.003, 0.1, 0.5, 0.97)[int(torch.randint(0, 4, (), generator=source))]
    return torch.rand(lengths, generator=source) < density


def in_blocks(lengths: tuple[int, int], source: torch.Generator) -> Tensor:
    """Blocks of 64 x 64 that are kept or not, as a TileMap has them; the edges are cut."""
    blocks = torch.rand(6, 7, generator=source) < 0.5
    return blocks.repeat_interleave(64, 0).repeat_interleave(64, 1)[: lengths[0], : lengths[1]]


def a_tree(lengths: tuple[int, int], source: torch.Generator) -> Tensor:
    """As in speculative decoding: a query attends a context, its ancestors and itself."""
    nodes = min(lengths)
    ancestors = torch.zeros(lengths, dtype=torch.bool)
    for node in range(nodes):
        if node:
            ancestors[node] = ancestors[int(torch.randint(0, node, (), generator=source))]
        ancestors[node, node] = True
    ancestors[:, : lengths[1] // 4] = True
    return ancestors


def a_band(lengths: tuple[int, int], source: torch.Generator) -> Tensor:
    width = int(torch.randint(1, 200, (), generator=source))
    distance = torch.arange(lengths[0])[:, None] - torch.arange(lengths[1])
    return (distance >= 0) & (distance < width)


def nearly_all(lengths: tuple[int, int], source: torch.Generator) -> Tensor:
    mask = torch.ones(lengths, dtype=torch.bool)
    mask[int(torch.randint(0, lengths[0], (), generator=source)), int(torch.randint(0, lengths[1], (), generator=source))] = False
    return mask


SORTS = (scattered, in_blocks, a_tree, a_band, nearly_all)
