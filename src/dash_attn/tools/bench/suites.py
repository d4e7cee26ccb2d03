"""The shapes a benchmark times, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Protocol

from .shape import Shape

TOKENS = 16384  # batch x seqlen
MASKS = ("causal", "full")
HOST_SUITE = "host"
Numbers = tuple[int, ...] | None


class Shapes(Protocol):
    def shapes(self) -> list[Shape]: ...

    def chosen(self, name: str, seqlens: Numbers, head_dims: Numbers, masks: tuple[str, ...] | None) -> list[Shape]:
        """Those that fit these lists. `name` is for errors."""


@dataclass(frozen=True)
class Suite:
    """All combinations of heads, head dims, masks and sequence lengths, each of 16384 tokens."""

    seqlens: tuple[int, ...]
    head_dims: tuple[int, ...]
    masks: tuple[str, ...] = MASKS
    heads: tuple[tuple[int, int], ...] = ()  # query and KV heads; none: as many as make heads x head dim 2048

    def shapes(self) -> list[Shape]:
        made = []
        for head_dim, mask, seqlen in product(self.head_dims, self.masks, self.seqlens):
            for q_heads, kv_heads in self.heads or ((2048 // head_dim,) * 2,):
                made.append(Shape(mask, seqlen, max(1, TOKENS // seqlen), q_heads, kv_heads, head_dim))
        return made

    def chosen(self, name: str, seqlens: Numbers, head_dims: Numbers, masks: tuple[str, ...] | None) -> list[Shape]:
        """The lists replace those of the grid."""
        if masks and not set(masks) <= set(MASKS):
            raise ValueError(f"suite {name} takes the masks {' and '.join(MASKS)}; got {', '.join(masks)}")
        if head_dims and not self.heads and any(dim < 1 or 2048 % dim for dim in head_dims):
            raise ValueError(f"--head-dims must divide 2048; got {', '.join(map(str, head_dims))}")
        changes: dict[str, Any] = {"seqlens": seqlens, "head_dims": head_dims, "masks": masks}
        return replace(self, **{key: value for key, value in changes.items() if value}).shapes()


SUITES: dict[str, Shapes] = {"quick": Suite((1024, 4096), (128,)), "gqa": Suite((4096, 8192), (128,), heads=((32, 8),))}


def choose(
    suites: Mapping[str, Shapes], name: str, seqlens: Numbers = None, head_dims: Numbers = None, masks: tuple[str, ...] | None = None
) -> list[Shape]:
    """The shapes of a suite; none of the host's, which has its own."""
    if name == HOST_SUITE:
        return []
    if name not in suites:
        raise ValueError(f"unknown suite {name!r}; choose from {', '.join((*suites, HOST_SUITE))}")
    if seqlens and min(seqlens) < 1:
        raise ValueError(f"--seqlens must be at least 1; got {', '.join(map(str, seqlens))}")
    return suites[name].chosen(name, seqlens, head_dims, masks)
