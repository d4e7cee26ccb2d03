"""Query heads that share a KV head are walked by one chain, which then sums their dK and dV alone. That leaves few chains where
one KV head serves many, so large groups are split: parts of a group run as groups of their own, on copies of K and V, and their
dK and dV, rounded to 16 bits like any gradient, are added in order. Split by the size of the group alone, the bits are the same
in any batch, packed, and on any tensor-parallel rank.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from torch import Tensor

from ...options import AttentionOptions

LARGEST_GROUP = 8  # query heads a chain walks


@lru_cache
def parts_of(group: int) -> int:
    """How many equal parts a group is split into, as few as may be."""
    return next(parts for parts in range(1, group + 1) if group % parts == 0 and group // parts <= LARGEST_GROUP)


def split(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor, AttentionOptions]:
    """K, V and options with a KV head for every part of a group."""
    parts = parts_of(q.shape[-2] // k.shape[-2])
    if parts == 1:
        return k, v, options
    return k.repeat_interleave(parts, -2), v.repeat_interleave(parts, -2), _of_parts(options, parts)


def without_data(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor, AttentionOptions]:
    """What `split` gives, for those who look at shapes only."""
    parts = parts_of(q.shape[-2] // k.shape[-2])
    if parts == 1:
        return k, v, options
    many_k, many_v = (x[..., :1, :].expand(*x.shape[:-2], parts * x.shape[-2], x.shape[-1]) for x in (k, v))
    return many_k, many_v, _of_parts(options, parts)


def bytes_of_copies(k: Tensor, v: Tensor, many_k: Tensor, many_v: Tensor) -> int:
    """K and V for every part, and their gradients."""
    return 0 if many_k.shape == k.shape else 2 * (many_k.numel() + many_v.numel()) * k.element_size()


@lru_cache(maxsize=64)
def _of_parts(options: AttentionOptions, parts: int) -> AttentionOptions:
    return replace(options, head_offset=options.head_offset * parts)


def add_in_order(gradient: Tensor, shape: tuple[int, ...]) -> Tensor:
    """dK or dV of this shape. Parts of a group lie side by side and are added one after the other: a sum over a dimension
    would be free to choose its order."""
    if gradient.shape == shape:
        return gradient
    first, *others = gradient.unflatten(-2, (shape[-2], -1)).unbind(-2)
    total = first.float()
    for part in others:
        total += part
    return total.to(gradient.dtype)
