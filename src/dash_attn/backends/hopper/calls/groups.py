"""Query heads that share a KV head are walked by one chain, which then sums their dK and dV alone. That leaves few chains where
one KV head serves many, so large groups are split: parts of a group run as groups of their own, on copies of K and V, and their
dK and dV, rounded to 16 bits like any gradient, are added in order. Split by the size of the group alone, the bits are the same
in any batch, packed, and on any tensor-parallel rank that keeps groups whole.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from torch import Tensor

from ....call.options import AttentionOptions

LARGEST_GROUP = 8  # query heads per chain


@lru_cache
def parts_of(group: int) -> int:
    """How many equal parts a group is split into, as few as possible."""
    return next(parts for parts in range(1, group + 1) if group % parts == 0 and group // parts <= LARGEST_GROUP)


def parts_between(q: Tensor, k: Tensor) -> int:
    return parts_of(q.shape[-2] // k.shape[-2])


def split(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, shapes_only: bool = False) -> tuple[Tensor, Tensor, AttentionOptions]:
    """K, V and options with a KV head for every part of a group. `shapes_only`: nothing is copied, the data are not right."""
    parts = parts_between(q, k)
    if parts == 1:
        return k, v, options
    many_k, many_v = (_of_shape(x, parts) if shapes_only else x.repeat_interleave(parts, -2) for x in (k, v))
    return many_k, many_v, _of_parts(options, parts)


def _of_shape(x: Tensor, parts: int) -> Tensor:
    return x[..., :1, :].expand(*x.shape[:-2], parts * x.shape[-2], x.shape[-1])


def bytes_of_copies(k: Tensor, v: Tensor, parts: int) -> int:
    """K and V for every part, and their gradients."""
    return 0 if parts == 1 else 2 * parts * (k.numel() + v.numel()) * k.element_size()


@lru_cache(maxsize=64)
def _of_parts(options: AttentionOptions, parts: int) -> AttentionOptions:
    return replace(options, head_offset=options.head_offset * parts)


def add_in_order(gradient: Tensor, shape: tuple[int, ...]) -> Tensor:
    """dK or dV of this shape. Parts of a group lie side by side and are added one after the other: a sum over a dimension
    would be free to choose its order."""
    if gradient.shape == shape:
        return gradient
    first, *others = gradient.unflatten(-2, (shape[-2], -1)).unbind(-2)
    total: Tensor = first.float()
    for part in others:
        total += part
    return total.to(gradient.dtype)
