"""Data of a call that change scores or weights: the seeds of dropout, the slopes of ALiBi, the elements of a boolean mask."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..masks import BooleanMask
from .options import is_zero

MOST_SEED = 2**63 - 1


class Modifiers(NamedTuple):
    """seeds: (sequences,). slopes: (query heads,) or (sequences, query heads). They come where the options ask for them.
    first_head: the place of their first query head among those of the problem, where a call has only some.
    elements: of the partial tiles of a boolean mask, whose pattern is the options' mask.
    """

    seeds: Tensor | None = None
    slopes: Tensor | None = None
    first_head: int = 0
    elements: BooleanMask | None = None

    def of_sequence(self, number: int) -> Modifiers:
        """Of one sequence, as a batch."""
        return self.of_sequences(slice(number, number + 1))

    def of_sequences(self, some: slice) -> Modifiers:
        seeds, slopes = self.seeds, self.slopes
        if slopes is not None and slopes.ndim == 2:
            slopes = slopes[some]
        elements = None if self.elements is None else self.elements.some(some, slice(None))
        return self._replace(seeds=None if seeds is None else seeds[some], slopes=slopes, elements=elements)

    def of_heads(self, heads: slice) -> Modifiers:
        """Of some query heads."""
        slopes = None if self.slopes is None else self.slopes[..., heads]
        elements = None if self.elements is None else self.elements.some(slice(None), heads)
        return self._replace(slopes=slopes, first_head=self.first_head + heads.start, elements=elements)

    def of_documents(self, count: int) -> Modifiers:
        """Of `count` documents in each sequence. There is no dropout."""
        if self.slopes is None or self.slopes.ndim == 1:
            return self
        return self._replace(slopes=self.slopes.repeat_interleave(count, 0))


def modifiers_of(q: Tensor, sequences: int, dropout_p: float, dropout_seed: Tensor | None, alibi_slopes: Tensor | None) -> Modifiers | None:
    """What a call was given, checked; seeds that it was not given are drawn from PyTorch's generator of the device."""
    check_seeds(dropout_seed, q, sequences)
    check_slopes(alibi_slopes, q, sequences)
    if is_zero(dropout_p):
        return None if alibi_slopes is None else Modifiers(None, alibi_slopes)
    if dropout_seed is None:
        dropout_seed = torch.randint(0, MOST_SEED, (sequences,), dtype=torch.int64, device=q.device)
    return Modifiers(dropout_seed, alibi_slopes)


def with_elements(modifiers: Modifiers | None, elements: BooleanMask | None) -> Modifiers | None:
    return modifiers if elements is None else (modifiers or Modifiers())._replace(elements=elements)


def given_modifiers(
    q: Tensor, sequences: int, dropout_p: float, dropout_seed: Tensor | None, alibi_slopes: Tensor | None
) -> Modifiers | None:
    """As modifiers_of, where nobody may draw seeds."""
    if dropout_seed is None and not is_zero(dropout_p):
        raise ValueError(
            "ranks that share a sequence must drop the same pairs, but each has a generator of its own: give dropout_seed, the same"
            f" {sequences} numbers of torch.int64 on every rank; got dropout_p={dropout_p!r} and no dropout_seed"
        )
    return modifiers_of(q, sequences, dropout_p, dropout_seed, alibi_slopes)


def check_seeds(seeds: Tensor | None, q: Tensor, sequences: int) -> None:
    """One whole number per sequence."""
    if seeds is None:
        return
    if not isinstance(seeds, Tensor):
        raise TypeError(f"dropout_seed must be a tensor or None; got {type(seeds).__name__}")
    if seeds.dtype != torch.int64 or tuple(seeds.shape) != (sequences,):
        raise ValueError(
            f"dropout_seed must be {sequences} numbers of torch.int64, one per sequence; got {seeds.dtype} of shape {tuple(seeds.shape)}"
        )
    if seeds.device != q.device:
        raise ValueError(f"dropout_seed must be on the device of q, k and v ({q.device}); got {seeds.device}")


def check_slopes(slopes: Tensor | None, q: Tensor, sequences: int) -> None:
    """One number per query head, or per sequence and query head."""
    if slopes is None:
        return
    if not isinstance(slopes, Tensor):
        raise TypeError(f"alibi_slopes must be a tensor or None; got {type(slopes).__name__}")
    heads = q.shape[-2]
    if tuple(slopes.shape) not in ((heads,), (sequences, heads)) or not slopes.dtype.is_floating_point:
        raise ValueError(
            f"alibi_slopes must be floating-point numbers of shape ({heads},), one per query head, or ({sequences}, {heads});"
            f" got {slopes.dtype} of shape {tuple(slopes.shape)}"
        )
    if slopes.device != q.device:
        raise ValueError(f"alibi_slopes must be on the device of q, k and v ({q.device}); got {slopes.device}")
    if slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError("alibi_slopes get no gradient, as in FlashAttention: pass alibi_slopes.detach(); got slopes that require one")
