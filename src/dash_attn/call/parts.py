"""Calls that run as other calls, whatever the backend: documents in a row as packed sequences, and heads of one pattern at a time.

Documents in a row are packed sequences: each has the bits it has alone, and nothing of its neighbours reaches it, not even a NaN. Only a
schedule that is asked for by name needs the whole mask.

Boolean masks may differ between sequences or heads. Heads of one pattern share a problem, the others have their own: each KV head with its
query heads has the bits that it has alone with its own masks, as on a tensor-parallel rank (head_offset). Where query heads of one group
differ in their patterns, each is computed as if it had keys and values of its own. Their dK and dV are then added in float32 (float64),
first head to last. So bits never depend on the masks of other groups or sequences.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..masks import Causal, Documents, Full, PatternPerHead
from .call import Call, Gradients, Grads, Saved, no_pairs
from .offsets import SequenceOffsets
from .options import AttentionOptions

Upload = Callable[[NDArray[Any], torch.device], Tensor]
Forward = Callable[[Call], Saved]
Backward = Callable[[Call, Saved, Grads], Gradients]


def runs_packed(options: AttentionOptions) -> bool:
    return isinstance(options.mask, Documents) and options.schedule == "auto"


@lru_cache(maxsize=64)
def of_a_document(options: AttentionOptions) -> AttentionOptions:
    """The options of one document alone."""
    assert isinstance(options.mask, Documents)
    return replace(options, mask=Causal() if options.mask.causal else Full())


def offsets_of_documents(lengths: tuple[int, ...], batch: int, device: torch.device, upload: Upload | None = None) -> SequenceOffsets:
    """Of all sequences, laid end to end. upload: to a GPU, where something may have to be seen to."""
    on_host = np.array([0, *accumulate(lengths * batch)], dtype=np.int32)
    ends = torch.from_numpy(on_host).to(device) if upload is None else upload(on_host, device)
    # Room for a longer document changes no bit, but other lengths then find the same prepared call.
    longest = min(sum(lengths), 1 << (max(lengths) - 1).bit_length())
    return SequenceOffsets(ends, ends, longest, longest)


def end_to_end(call: Call, options: AttentionOptions, offsets: SequenceOffsets) -> Call:
    """The call of packed sequences that dense tensors are, as many in each row."""
    modifiers, each = call.modifiers, (len(offsets.cu_seqlens_q) - 1) // max(1, len(call.q))
    modifiers = None if modifiers is None else modifiers.of_documents(each)
    q, k, v = (x.flatten(0, 1) for x in call.tensors)  # views where sequences follow each other in memory, else copies
    return Call(q, k, v, options, offsets, call.sinks, modifiers)


def in_rows(saved: Saved, call: Call) -> Saved:
    """Results of sequences laid end to end, as those of dense tensors."""
    batch, length, heads, _ = call.q.shape
    return Saved(saved.out.unflatten(0, (batch, length)), saved.lse.view(heads, batch, length).transpose(0, 1).contiguous())


def backward_end_to_end(backward: Backward, packed: Call, saved: Saved, grads: Grads) -> Gradients:
    """Gradients of dense tensors, by a backward of packed ones."""
    lse, dlse = (None if x is None else x.transpose(0, 1).flatten(1) for x in (saved.lse, grads.lse))
    assert lse is not None
    found = backward(packed, Saved(saved.out.flatten(0, 1), lse), Grads(grads.out.flatten(0, 1), dlse))
    shape: Any = saved.out.shape[:2]
    dq, dk, dv = (x.unflatten(0, shape) for x in found[:3])
    return Gradients(dq, dk, dv, found.sinks)


def each_planned_alone(call: Call) -> list[Call]:
    """The calls whose orders decide the bits: of each document, of each packed sequence, of heads of one pattern; or the call itself."""
    if call.offsets is not None:
        sequences = enumerate(call.offsets.sequences(len(call.q), len(call.k)))
        found = (call.of_sequence(number, *both) for number, both in sequences)
        return [one for one in found if not no_pairs(one)]
    if runs_packed(call.options):
        assert isinstance(call.options.mask, Documents)
        own = of_a_document(call.options)
        return [Call(call.q[:1, :length], call.k[:1, :length], call.v[:1, :length], own) for length in call.options.mask.lengths]
    if isinstance(call.options.mask, PatternPerHead):
        return [one.of(call) for one in together(call)]
    return [call]


def runs_whole(call: Call) -> bool:
    return call.offsets is None and not runs_packed(call.options) and not isinstance(call.options.mask, PatternPerHead)


@dataclass(frozen=True)
class Together:
    """Heads of neighbouring sequences that share a problem. `options` are those of a call of their own."""

    rows: slice  # sequences
    heads: slice  # query heads
    kv_heads: slice
    options: AttentionOptions
    place_in_group: int | None = None  # of one query head, whose neighbours on the same KV head differ

    def queries(self, x: Tensor) -> Tensor:
        """Of (sequences, length, heads, dim)."""
        return x[self.rows, :, self.heads]

    def keys(self, x: Tensor) -> Tensor:
        return x[self.rows, :, self.kv_heads]

    def of(self, call: Call) -> Call:
        """head_offset says which heads these are, so that first_head does not."""
        modifiers = call.modifiers
        if modifiers is not None:
            modifiers = modifiers.of_sequences(self.rows).of_heads(self.heads)._replace(first_head=modifiers.first_head)
        own = self.queries(call.q), self.keys(call.k), self.keys(call.v)
        return Call(*own, self.options, None, None if call.sinks is None else call.sinks[self.heads], modifiers)


def together(call: Call, alone: bool = False) -> Iterator[Together]:
    """All heads of all sequences. Sequences that have the same patterns in all heads go together, unless each shall be alone."""
    mask, heads, kv_heads = call.options.mask, call.q.shape[2], call.k.shape[2]
    assert isinstance(mask, PatternPerHead)
    for _, run in groupby(range(len(call.q)), key=lambda row: (row if alone else 0, mask.of_heads(row))):
        alike = list(run)
        yield from _of_sequences(slice(alike[0], alike[-1] + 1), heads, kv_heads, call.options)


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


def forward_per_head(forward: Forward, call: Call) -> Saved:
    """By a backend's forward of one pattern."""
    q, lses = call.q, None
    outs = q.new_empty(*q.shape[:3], call.v.shape[-1])
    for one in together(call):
        out, lse = forward(one.of(call))
        lses = lse.new_empty(q.shape[0], q.shape[2], q.shape[1]) if lses is None else lses
        outs[one.rows, :, one.heads], lses[one.rows, one.heads] = out, lse
    assert lses is not None, "there is a query"
    return Saved(outs, lses)


def backward_per_head(backward: Backward, call: Call, saved: Saved, grads: Grads, exact: bool) -> Gradients:
    """By a backend's backward of one pattern. exact: it computes gradients that are not rounded, of sequences one by one."""
    q, k, _ = call.tensors
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    dq, dk, dv = (
        torch.empty(x.shape, dtype=wide if exact else x.dtype, device=x.device) for x in call.tensors
    )  # where they are exact, they are rounded once, at the end
    dsinks = torch.zeros(q.shape[2], dtype=wide, device=q.device)
    last_of_group, of_group = q.shape[2] // k.shape[2] - 1, list[Tensor]()
    for one in together(call, alone=exact):
        found = backward(*_own_backward(one, call, saved, grads, wide if exact else q.dtype, wide))
        dq[one.rows, :, one.heads], keys = found.q, [found.k, found.v]
        if one.place_in_group is not None:  # dK and dV of the heads of a group so far
            keys = [x.to(wide) for x in keys]
            of_group = keys = keys if one.place_in_group == 0 else [x + y for x, y in zip(of_group, keys, strict=True)]
        if one.place_in_group in (None, last_of_group):
            dk[one.rows, :, one.kv_heads], dv[one.rows, :, one.kv_heads] = keys
        if found.sinks is not None:
            dsinks[one.heads] += found.sinks
    dq, dk, dv = (x.to(q.dtype) for x in (dq, dk, dv))
    return Gradients(dq, dk, dv, None if call.sinks is None else dsinks.to(call.sinks.dtype))


def _own_backward(
    one: Together, call: Call, saved: Saved, grads: Grads, dtype: torch.dtype, dtype_of_sinks: torch.dtype
) -> tuple[Call, Saved, Grads]:
    """The backward of some heads, whose tensors have this dtype."""
    own, lse = one.of(call), saved.lse[one.rows, one.heads]
    q, k, v, out, dout = (x.to(dtype) for x in (*own.tensors, one.queries(saved.out), one.queries(grads.out)))
    own = own._replace(q=q, k=k, v=v, sinks=None if own.sinks is None else own.sinks.detach().to(dtype_of_sinks))
    return own, Saved(out, lse), Grads(dout, None if grads.lse is None else grads.lse[one.rows, one.heads])
