"""Boolean masks that differ between sequences or heads, on this backend: launches for the heads of one pattern at a time.

call/mask_per_head.py says which heads go together, and why bits depend on nothing else. Where query heads of one group have several
patterns, each head's dK and dV come in 16 bits; they are added in float32, first head to last.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....call.mask_per_head import Gradients, Together, forward_per_head, together
from ....call.modifiers import Modifiers
from ....call.options import AttentionOptions
from ....masks import PatternPerHead
from .backward import backward as backward_of_batch
from .forward import forward as forward_of_batch


def forward(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, sinks: Tensor | None, modifiers: Modifiers | None
) -> tuple[Tensor, Tensor]:
    """Output and LSE of dense tensors."""
    _refuse_capture(options, modifiers)
    if not isinstance(options.mask, PatternPerHead):
        return forward_of_batch(q, k, v, options, None, sinks, modifiers)
    return forward_per_head(forward, q, k, v, options, sinks, modifiers)


def backward(
    tensors: tuple[Tensor, ...],
    of_rows: tuple[Tensor, Tensor | None],
    options: AttentionOptions,
    sinks: Tensor | None,
    modifiers: Modifiers | None,
) -> Gradients:
    """Gradients of dense tensors (dout, q, k, v, out), and of the sinks."""
    dout, q, k, v, out = tensors
    _refuse_capture(options, modifiers)
    if not isinstance(options.mask, PatternPerHead):
        return backward_of_batch(dout, q, k, v, out, of_rows[0], options, None, sinks, of_rows[1], modifiers)
    sums = _Sums(q, k, v, sinks)
    for one in together(q, k, options):
        (own_dout, own_q, own_out), (own_k, own_v) = one.queries(dout, q, out), one.keys(k, v)
        lse = one.of_rows(of_rows[0])
        assert lse is not None
        own_sinks = None if sinks is None else sinks.detach().float()[one.heads]
        rest = one.options, None, own_sinks, one.of_rows(of_rows[1]), one.modifiers(modifiers)
        sums.add(one, backward_of_batch(own_dout, own_q, own_k, own_v, own_out, lse, *rest))
    return sums.dq, sums.dk, sums.dv, None if sinks is None else sums.dsinks.to(sinks.dtype)


def _refuse_capture(options: AttentionOptions, modifiers: Modifiers | None) -> None:
    """A graph would hold the addresses of tables and bits that are kept as long as the mask, and launches for all of its patterns."""
    elements = None if modifiers is None else modifiers.elements
    differ = isinstance(options.mask, PatternPerHead) or (elements is not None and elements.numbers.size > 1)
    if differ and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "boolean masks that differ between sequences or heads cannot be captured in a CUDA graph: give one mask for all,"
            f" made as a BooleanMask before the capture; got {options.mask if elements is None else elements}"
        )


class _Sums:
    """Gradients of all heads, from those of some at a time."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
        self.dq, self.dk, self.dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        self.dsinks = torch.zeros(q.shape[2] if sinks is not None else 0, dtype=torch.float32, device=q.device)
        self._last_of_group = q.shape[2] // k.shape[2] - 1
        self._of_group: list[Tensor] = []  # dK and dV of the heads of a group so far

    def add(self, one: Together, found: Gradients) -> None:
        dq, dk, dv, dsinks = found
        self.dq[one.rows, :, one.heads] = dq
        if one.place_in_group is None:
            self.dk[one.rows, :, one.kv_heads], self.dv[one.rows, :, one.kv_heads] = dk, dv
        else:
            self._add_to_group(one, dk.float(), dv.float())
        if dsinks is not None:
            self.dsinks[one.heads] += dsinks

    def _add_to_group(self, one: Together, dk: Tensor, dv: Tensor) -> None:
        self._of_group = [dk, dv] if one.place_in_group == 0 else [x + y for x, y in zip(self._of_group, (dk, dv), strict=True)]
        if one.place_in_group == self._last_of_group:
            self.dk[one.rows, :, one.kv_heads], self.dv[one.rows, :, one.kv_heads] = self._of_group
