"""A call of attention: its tensors and everything that was chosen. Backends take it whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..masks import BooleanMask
from .boolean_masks import take_mask
from .offsets import Packed, SequenceOffsets
from .options import AttentionOptions, Choices, choose_mask, is_zero, options_for, refuse_given_schedule
from .tensor_checks import check_seeds, check_sinks, check_slopes, check_tensors

MOST_SEED = 2**63 - 1


class Modifiers(NamedTuple):
    """Data that change scores or weights: the seeds of dropout, the slopes of ALiBi, the elements of a boolean mask.

    seeds: (sequences,). slopes: (query heads,) or (sequences, query heads). They come where the options ask for them.
    first_head: the place of their first query head among those of the problem, where a call has only some.
    elements: of the partial tiles of a boolean mask, whose pattern is the options' mask.
    """

    seeds: Tensor | None = None
    slopes: Tensor | None = None
    first_head: int = 0
    elements: BooleanMask | None = None

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


class Given(NamedTuple):
    """Tensors that come with q, k and v, as a call was given them. Ranks that share a sequence have them alike."""

    sinks: Tensor | None = None
    dropout_seed: Tensor | None = None
    alibi_slopes: Tensor | None = None

    def check(self, q: Tensor, sequences: int) -> None:
        """All but the sinks, which need not wait for the options."""
        check_seeds(self.dropout_seed, q, sequences)
        check_slopes(self.alibi_slopes, q, sequences)

    def drawn(self, q: Tensor, sequences: int, dropout_p: float) -> Given:
        """Checked, with seeds where there is dropout: those that were not given are drawn from PyTorch's generator of the device."""
        self.check(q, sequences)
        if is_zero(dropout_p):
            return self._replace(dropout_seed=None)
        if self.dropout_seed is not None:
            return self
        return self._replace(dropout_seed=torch.randint(0, MOST_SEED, (sequences,), dtype=torch.int64, device=q.device))

    @property
    def modifiers(self) -> Modifiers | None:
        return None if self.dropout_seed is None and self.alibi_slopes is None else Modifiers(self.dropout_seed, self.alibi_slopes)

    def of_heads(self, heads: slice) -> Given:
        """Of some query heads."""
        sinks, slopes = (None if x is None else x[..., heads] for x in (self.sinks, self.alibi_slopes))
        return Given(sinks, self.dropout_seed, slopes)


def with_elements(modifiers: Modifiers | None, elements: BooleanMask | None) -> Modifiers | None:
    return modifiers if elements is None else (modifiers or Modifiers())._replace(elements=elements)


def sequences_in(q: Tensor, packed: Packed | None) -> int:
    return q.shape[0] if packed is None else len(packed[0]) - 1


def options_of(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, choices: Choices, packed: Packed | None
) -> tuple[AttentionOptions, SequenceOffsets | None, BooleanMask | None]:
    """The options of a call of these tensors; everything is checked that can be without a plan or lengths. And the offsets of packed
    sequences, or the elements of a boolean mask."""
    check_tensors(q, k, v, ndim=4 if packed is None else 3)
    check_sinks(sinks, q)
    if packed is not None:
        offsets = SequenceOffsets(*packed)
        if not q.is_meta:
            offsets.check_device(q.device)
        options = options_for(choices, q.shape[-1])
        refuse_given_schedule(options)
        return options, offsets, None
    elements = None
    if choices.mask is not None:
        mask, elements = take_mask(choose_mask(choices.mask, choices.causal, choices.window_size), q, k)
        choices = choices._replace(mask=mask)
    options = options_for(choices, q.shape[-1])
    if options.mask.sides is None:  # others fit any lengths
        options.mask.check(q.shape[1], k.shape[1])
    return options, None, elements


class Call(NamedTuple):
    """Dense tensors are (batch, length, heads, head dim). With `offsets` they are (tokens, heads, head dim), and some sequences may be
    empty. `sinks` are (query heads,) logits that each row's softmax also sums. `modifiers` come where the options have dropout or ALiBi,
    or a boolean mask has partial tiles.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    options: AttentionOptions
    offsets: SequenceOffsets | None = None
    sinks: Tensor | None = None
    modifiers: Modifiers | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self[:3]

    @property
    def elements(self) -> BooleanMask | None:
        return None if self.modifiers is None else self.modifiers.elements

    def of_sequence(self, number: int, rows: slice, columns: slice) -> Call:
        """One of packed sequences, as a batch."""
        modifiers = None if self.modifiers is None else self.modifiers.of_sequences(slice(number, number + 1))
        own = self.q[None, rows], self.k[None, columns], self.v[None, columns]
        return Call(*own, self.options, None, self.sinks, modifiers)


class Saved(NamedTuple):
    """What a forward returns, and its backward needs: output, and LSE as (batch, query heads, length) or (query heads, tokens)."""

    out: Tensor
    lse: Tensor


class Grads(NamedTuple):
    """Of the output, and of the LSE where it was used."""

    out: Tensor
    lse: Tensor | None = None


class Gradients(NamedTuple):
    """What a backward returns; `sinks` where there are any."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None = None


def cut(tensor: Tensor, dim: int) -> Tensor:
    """The first `dim` columns: what is there without padding."""
    return tensor if tensor.shape[-1] == dim else tensor[..., :dim].contiguous()


def no_pairs(call: Call) -> bool:
    """Where there is no query or no key, a backend has no tile to visit, so none is asked."""
    return call.q.numel() == 0 or call.k.numel() == 0


def forward_of_nothing(call: Call) -> Saved:
    """Output 0 and LSE of an empty sum: the sink, or -inf without one."""
    q, sinks = call.q, call.sinks
    *batch, length, heads, _ = q.shape
    lse = q.new_full((*batch, heads, length), -torch.inf, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    if sinks is not None:
        lse.copy_(sinks.detach()[:, None].expand_as(lse))
    return Saved(q.new_zeros(*batch, length, heads, call.v.shape[-1]), lse)


def backward_of_nothing(call: Call, grads: Grads) -> Gradients:
    """Zeros, laid out like any other gradient: contiguous. Only the sinks, which are the LSE here, have its gradient."""
    dsinks = None if call.sinks is None else sink_gradient_of_nothing(call.sinks, grads.lse)
    dq, dk, dv = (x.new_zeros(x.shape) for x in call.tensors)
    return Gradients(dq, dk, dv, dsinks)


def sink_gradient_of_nothing(sinks: Tensor, dlse: Tensor | None) -> Tensor:
    """The sum of each head's rows, sequence by sequence. A sink of -inf is no sink."""
    total = torch.zeros(sinks.shape, dtype=sinks.dtype if dlse is None else dlse.dtype, device=sinks.device)
    if dlse is not None:
        for sequence in dlse if dlse.ndim == 3 else dlse[None]:
            total += sequence.sum(-1)
        total.masked_fill_(sinks == -torch.inf, 0)
    return total.to(sinks.dtype)


def sum_in_order(parts: Tensor | Sequence[Tensor]) -> Tensor:
    """Over the sequences of a batch, first to last, at least one: the order is part of the contract."""
    total = torch.zeros_like(parts[0])
    for part in parts:
        total += part
    return total
