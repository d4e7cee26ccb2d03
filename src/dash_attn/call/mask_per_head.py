"""Boolean masks that differ between sequences or heads: heads of one pattern share a problem, the others have their own.

Each KV head with its query heads has the bits that it has alone with its own masks, as on a tensor-parallel rank (head_offset). Where
query heads of one group differ in their patterns, each is computed as if it had keys and values of its own. Their dK and dV are then
added in float32 (float64), first head to last. So bits never depend on the masks of other groups or sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from ..masks import PatternPerHead
from .modifiers import Modifiers
from .options import AttentionOptions

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]
Forward = Callable[..., tuple[Tensor, Tensor]]
Backward = Callable[..., Gradients]


@dataclass(frozen=True)
class Together:
    """Heads of neighbouring sequences that share a problem. `options` are those of a call of their own."""

    rows: slice  # sequences
    heads: slice  # query heads
    kv_heads: slice
    options: AttentionOptions
    place_in_group: int | None = None  # of one query head, whose neighbours on the same KV head differ

    def queries(self, *tensors: Tensor) -> list[Tensor]:
        """(sequences, length, heads, dim)"""
        return [x[self.rows, :, self.heads] for x in tensors]

    def keys(self, *tensors: Tensor) -> list[Tensor]:
        return [x[self.rows, :, self.kv_heads] for x in tensors]

    def of_rows(self, x: Tensor | None) -> Tensor | None:
        """Of the LSE or its gradient, (sequences, heads, length)."""
        return None if x is None else x[self.rows, self.heads]

    def modifiers(self, all_: Modifiers | None) -> Modifiers | None:
        """head_offset says which heads these are, so that first_head does not."""
        return None if all_ is None else all_.of_sequences(self.rows).of_heads(self.heads)._replace(first_head=all_.first_head)


def together(q: Tensor, k: Tensor, options: AttentionOptions) -> Iterator[Together]:
    """All heads of all sequences. Sequences that have the same patterns in all heads go together."""
    assert isinstance(options.mask, PatternPerHead)
    for _, run in groupby(range(q.shape[0]), key=options.mask.of_heads):
        alike = list(run)
        yield from _of_sequences(slice(alike[0], alike[-1] + 1), q.shape[2], k.shape[2], options)


def _of_sequences(rows: slice, heads: int, kv_heads: int, options: AttentionOptions) -> Iterator[Together]:
    """Neighbours of one pattern together."""
    mask, group, sequence = options.mask, heads // kv_heads, rows.start
    assert isinstance(mask, PatternPerHead)
    of_groups = [{mask.of(sequence, head) for head in range(kv_head * group, (kv_head + 1) * group)} for kv_head in range(kv_heads)]
    for patterns, run in groupby(range(kv_heads), key=lambda kv_head: of_groups[kv_head]):
        alike = list(run)
        if len(patterns) == 1:
            own = replace(options, mask=next(iter(patterns)), head_offset=options.head_offset + alike[0])
            yield Together(rows, slice(alike[0] * group, (alike[-1] + 1) * group), slice(alike[0], alike[-1] + 1), own)
            continue
        for head in range(alike[0] * group, (alike[-1] + 1) * group):
            own = replace(options, mask=mask.of(sequence, head), head_offset=options.head_offset * group + head)
            kv_head = head // group
            yield Together(rows, slice(head, head + 1), slice(kv_head, kv_head + 1), own, place_in_group=head % group)


def forward_per_head(
    forward: Forward, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, sinks: Tensor | None, modifiers: Modifiers | None
) -> tuple[Tensor, Tensor]:
    """Output and LSE, by a backend's forward of dense tensors."""
    outs, lses = q.new_empty(*q.shape[:3], v.shape[-1]), None
    for one in together(q, k, options):
        own_sinks = None if sinks is None else sinks[one.heads]
        out, lse = forward(*one.queries(q), *one.keys(k, v), one.options, own_sinks, one.modifiers(modifiers))
        lses = lse.new_empty(q.shape[0], q.shape[2], q.shape[1]) if lses is None else lses
        outs[one.rows, :, one.heads], lses[one.rows, one.heads] = out, lse
    assert lses is not None, "there is a query"
    return outs, lses


def backward_per_head(
    backward: Backward,
    tensors: tuple[Tensor, ...],
    of_rows: tuple[Tensor, Tensor | None],
    options: AttentionOptions,
    sinks: Tensor | None,
    modifiers: Modifiers | None,
) -> Gradients:
    """Gradients of dense tensors (dout, q, k, v, out); that of the sinks is (batch, query heads), as from the backend's backward."""
    dout, q, k, v, out = tensors
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    dq, dk, dv = (torch.empty(x.shape, dtype=exact) for x in (q, k, v))  # rounded once, at the end
    dsinks = None if sinks is None else torch.empty(q.shape[0], q.shape[2], dtype=exact)
    for one in together(q, k, options):
        own_dout, own_q, own_out = one.queries(dout, q, out)
        own = tuple(x.to(exact) for x in (own_dout, own_q, *one.keys(k, v), own_out))
        rows, own_sinks = (one.of_rows(of_rows[0]), one.of_rows(of_rows[1])), None if sinks is None else sinks[one.heads]
        found = backward(own, rows, one.options, own_sinks, one.modifiers(modifiers))
        dq[one.rows, :, one.heads] = found[0]
        for total, part in zip((dk, dv), found[1:3], strict=True):
            place = one.rows, slice(None), one.kv_heads
            total[place] = total[place] + part if one.place_in_group else part
        if dsinks is not None and found[3] is not None:
            dsinks[one.rows, one.heads] = found[3]
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks
