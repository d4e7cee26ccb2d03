"""Attention on the CPU: the reference for what a GPU kernel computes and in which order. tiles.py has the arithmetic.

Packed sequences, and so documents in a row, are computed one after another, each as if it were alone, so their bits are those of
each alone.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

import torch
from torch import Tensor

from ...call.any_workers import plan_on_any
from ...call.documents import backward_of_documents, forward_of_documents, of_a_document, offsets_of_documents, runs_packed
from ...call.empty import backward_of_nothing, forward_of_nothing, no_pairs, sink_gradient_of_nothing
from ...call.explanation import Explanation
from ...call.mask_per_head import backward_per_head, forward_per_head, together
from ...call.modifiers import Modifiers
from ...call.offsets import SequenceOffsets
from ...call.options import AttentionOptions
from ...call.planning import DEFAULT_WORKERS, explanation_of, explanation_of_several, plan_in_words, problem_of
from ...call.sums import sum_in_order
from ...execution.interleaving import Interleaving, current_interleaving
from ...execution.run import run_plan
from ...masks import Documents, PatternPerHead
from ...scheduling.order import reported
from ...scheduling.plan import Plan
from .ranks import run_in_legs
from .tiles import TILE_KV, TILE_Q, BackwardTiles, Share, arithmetic, fixed_arithmetic, forward_of_share, sink_gradients

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    offsets: SequenceOffsets | None = None,
    sinks: Tensor | None = None,
    modifiers: Modifiers | None = None,
) -> tuple[Tensor, Tensor]:
    """Output in the input's dtype, LSE in the dtype of the arithmetic."""
    if offsets is None:
        if runs_packed(options):
            return forward_of_documents(forward, (q, k, v), options, _offsets_of(q, options), sinks, modifiers)
        if options.gives_schedule:
            backward_plan(q, k, v, options)
        return _forward(q, k, v, options, sinks, modifiers)
    out, lse = q.new_empty(*q.shape[:2], v.shape[-1]), q.new_empty(q.shape[1], len(q), dtype=arithmetic(q.dtype))
    for number, (rows, columns) in enumerate(offsets.sequences(len(q), len(k))):
        options.mask.check(rows.stop - rows.start, columns.stop - columns.start)
        own = None if modifiers is None else modifiers.of_sequence(number)
        one, one_lse = _forward(q[None, rows], k[None, columns], v[None, columns], options, sinks, own)
        out[rows], lse[:, rows] = one[0], one_lse[0]
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: AttentionOptions,
    offsets: SequenceOffsets | None = None,
    sinks: Tensor | None = None,
    dlse: Tensor | None = None,
    modifiers: Modifiers | None = None,
) -> Gradients:
    """dQ, dK and dV in the inputs' dtype, summed in the order of the plan (or of arrival, where options say unordered)."""
    if offsets is None:
        if runs_packed(options):
            tensors = dout, q, k, v, out
            return backward_of_documents(backward, tensors, (lse, dlse), options, _offsets_of(q, options), sinks, modifiers)
        dq, dk, dv, per_sequence = _backward((dout, q, k, v, out), (lse, dlse), options, sinks, modifiers)
        return dq, dk, dv, _sum_in_order([] if per_sequence is None else list(per_sequence), sinks)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
    dsinks: list[Tensor] = []
    for number, (rows, columns) in enumerate(offsets.sequences(len(q), len(k))):
        tensors = dout[None, rows], q[None, rows], k[None, columns], v[None, columns], out[None, rows]
        of_rows = lse[None, :, rows], None if dlse is None else dlse[None, :, rows]
        own = None if modifiers is None else modifiers.of_sequence(number)
        one = _backward(tensors, of_rows, options, sinks, own)
        dq[rows], dk[columns], dv[columns] = one[0][0], one[1][0], one[2][0]
        dsinks += [] if one[3] is None else list(one[3])
    return dq, dk, dv, _sum_in_order(dsinks, sinks)


def _offsets_of(q: Tensor, options: AttentionOptions) -> SequenceOffsets:
    assert isinstance(options.mask, Documents)
    return offsets_of_documents(options.mask.lengths, len(q), q.device)


def backward_plan(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Plan:
    return plan_on_any(problem_of(q, k, options, TILE_Q, TILE_KV), options.schedule, DEFAULT_WORKERS).plan


def order_in_words(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> str:
    if runs_packed(options):
        return "planned document by document"
    if isinstance(options.mask, PatternPerHead):
        return "planned head by head"
    return plan_in_words(backward_plan(q, k, v, options))


def explain(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, predict_time: bool = True) -> Explanation:
    """Times are never predicted: nobody trains on this backend."""
    tiles = (TILE_Q, TILE_KV)
    note = "the CPU backend is for reference, its time is not modelled"
    fields = {"backward_tiles": tiles, "forward_tiles": tiles, "prediction_note": note}
    if isinstance(options.mask, PatternPerHead):
        return _without_gang(explanation_of_several(_plans_per_head(q, k, v, options), "cpu", (q, k, v), options, **fields))
    if not runs_packed(options):
        return _without_gang(explanation_of(backward_plan(q, k, v, options), "cpu", (q, k, v), options, **fields))
    assert isinstance(options.mask, Documents)
    alone = of_a_document(options)
    plans = [backward_plan(q[:1, :length], k[:1, :length], v[:1, :length], alone) for length in options.mask.lengths]
    return _without_gang(explanation_of_several(plans, "cpu", (q, k, v), options, **fields))


def _plans_per_head(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> list[Plan]:
    plans = []
    for one in together(q, k, options):
        (queries,), (keys, values) = one.queries(q), one.keys(k, v)
        plans.append(backward_plan(queries, keys, values, one.options))
    return plans


def _without_gang(described: Explanation) -> Explanation:
    """Chains rest in memory between the legs of their walks where they are too many to be resident together: no number is too few."""
    return replace(described, gang=1, guarantees=reported(described.guarantees, 1))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, sinks: Tensor | None, modifiers: Modifiers | None
) -> tuple[Tensor, Tensor]:
    """A batch of sequences of one length."""
    if no_pairs(q, k):
        return forward_of_nothing(q, v, sinks)
    if isinstance(options.mask, PatternPerHead):
        return forward_per_head(_forward, q, k, v, options, sinks, modifiers)
    problem = problem_of(q, k, options, TILE_Q, TILE_KV)
    return forward_of_share(q, k, v, options, sinks, problem, Share.whole(problem), modifiers)


def _backward(
    tensors: tuple[Tensor, ...],
    of_rows: tuple[Tensor, Tensor | None],
    options: AttentionOptions,
    sinks: Tensor | None,
    modifiers: Modifiers | None,
) -> Gradients:
    """A batch of sequences of one length, (dout, q, k, v, out) and (LSE, its gradient). The sinks' gradient is (batch, query heads):
    a part for each sequence."""
    dout, q, k, v, out = tensors
    if no_pairs(q, k):
        dq, dk, dv, _ = backward_of_nothing(q, k, v, None)
        return dq, dk, dv, None if sinks is None else _sink_parts_of_nothing(q, sinks, of_rows[1])
    if isinstance(options.mask, PatternPerHead):
        return backward_per_head(_backward, tensors, of_rows, options, sinks, modifiers)
    chosen = current_interleaving()
    if chosen is None:
        # "unordered" promises nothing, and the control must show it: every call arrives differently.
        chosen = Interleaving(None if options.ordered else secrets.randbits(64))
    problem = problem_of(q, k, options, TILE_Q, TILE_KV)
    planned = plan_on_any(problem, options.schedule, chosen.workers or DEFAULT_WORKERS)
    with fixed_arithmetic():
        if not options.ordered or planned.legs is None:  # unordered sums wait for nobody
            tiles = BackwardTiles(planned.plan, options, (dout, q, out), of_rows, Share.whole(problem), modifiers)
            tiles.take_keys(k, v)
            run_plan(planned.plan, tiles, options.ordered, chosen)
        else:
            tiles = run_in_legs(planned.plan, planned.legs, options, tensors, of_rows, modifiers)
        dsinks = None if sinks is None else sink_gradients(tiles.lse, tiles.delta, sinks.detach().to(tiles.lse.dtype))
        return (*tiles.gradients(options.scale, q.dtype), dsinks)


def _sink_parts_of_nothing(q: Tensor, sinks: Tensor, dlse: Tensor | None) -> Tensor:
    """The part of each sequence, (batch, query heads), where there is no query or no key."""
    logits = sinks.detach().to(arithmetic(q.dtype))
    parts = [sink_gradient_of_nothing(logits, None if dlse is None else dlse[i]) for i in range(len(q))]
    return torch.stack(parts) if parts else logits.new_zeros(0, len(logits))


def _sum_in_order(parts: list[Tensor], sinks: Tensor | None) -> Tensor | None:
    """The sum over sequences, first to last, in the dtype of the sinks."""
    if sinks is None:
        return None
    total = sum_in_order(parts) if parts else torch.zeros(sinks.shape)
    return total.to(sinks.dtype)
