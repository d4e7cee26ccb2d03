"""Attention on the CPU: the reference for what a GPU kernel computes and in which order. tiles.py has the arithmetic.

Packed sequences are computed one after another, each as if it were alone, so their bits are those of each alone.
"""

import secrets

import torch
from torch import Tensor

from ...call.call import Call, Gradients, Grads, Saved, backward_of_nothing, forward_of_nothing, no_pairs, sum_in_order
from ...call.planning import DEFAULT_WORKERS, plan_on_any, problem_of
from ...execution.interleaving import Interleaving, current_interleaving
from ...execution.run import run_plan
from ...scheduling.plan import Plan
from .ranks import run_in_legs
from .tiles import TILE_KV, TILE_Q, BackwardTiles, Share, arithmetic, fixed_arithmetic, forward_of_share, sink_gradients


def forward(call: Call) -> Saved:
    """Output in the input's dtype, LSE in the dtype of the arithmetic."""
    if call.offsets is None:
        return _forward(call)
    q, k, v = call.tensors
    out, lse = q.new_empty(*q.shape[:2], v.shape[-1]), q.new_empty(q.shape[1], len(q), dtype=arithmetic(q.dtype))
    for number, (rows, columns) in enumerate(call.offsets.sequences(len(q), len(k))):
        call.options.mask.check(rows.stop - rows.start, columns.stop - columns.start)
        one = _forward(call.of_sequence(number, rows, columns))
        out[rows], lse[:, rows] = one.out[0], one.lse[0]
    return Saved(out, lse)


def backward(call: Call, saved: Saved, grads: Grads) -> Gradients:
    """dQ, dK and dV in the inputs' dtype, summed in the order of the plan (or of arrival, where options say unordered)."""
    if call.offsets is None:
        dq, dk, dv, dsinks = _backward(call, saved, grads)
        return Gradients(dq, dk, dv, _sum_in_order(dsinks, call.sinks))
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype) for x in call.tensors)
    dsinks = []
    for number, (rows, columns) in enumerate(call.offsets.sequences(len(call.q), len(call.k))):
        own_grads = Grads(grads.out[None, rows], None if grads.lse is None else grads.lse[None, :, rows])
        one = _backward(call.of_sequence(number, rows, columns), Saved(saved.out[None, rows], saved.lse[None, :, rows]), own_grads)
        dq[rows], dk[columns], dv[columns] = one[0][0], one[1][0], one[2][0]
        dsinks += one[3]
    return Gradients(dq, dk, dv, _sum_in_order(dsinks, call.sinks))


def backward_plan(call: Call) -> Plan:
    """What the backward of dense tensors walks. Raises where that cannot be the schedule that was given."""
    return plan_on_any(problem_of(call, TILE_Q, TILE_KV), call.options.schedule, DEFAULT_WORKERS).plan


def _forward(call: Call) -> Saved:
    """A batch of sequences of one length."""
    if no_pairs(call):
        return forward_of_nothing(call)
    problem = problem_of(call, TILE_Q, TILE_KV)
    return forward_of_share(call, problem, Share(problem))


def _backward(call: Call, saved: Saved, grads: Grads) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """A batch of sequences of one length. The sinks' gradient is a part for each sequence; nothing without sinks."""
    if no_pairs(call):
        logits = None if call.sinks is None else call.sinks.detach().to(arithmetic(call.q.dtype))
        dq, dk, dv, of_sinks = backward_of_nothing(call._replace(sinks=logits), grads)
        return dq, dk, dv, [] if of_sinks is None else [of_sinks]
    options, chosen = call.options, current_interleaving()
    if chosen is None:
        # "unordered" promises nothing, and the control must show it: every call arrives differently.
        chosen = Interleaving(None if options.ordered else secrets.randbits(64))
    problem = problem_of(call, TILE_Q, TILE_KV)
    planned = plan_on_any(problem, options.schedule, chosen.workers or DEFAULT_WORKERS)
    with fixed_arithmetic():
        if not options.ordered or planned.legs is None:  # unordered sums wait for nobody
            rows = grads.out, call.q, saved.out
            tiles = BackwardTiles(planned.plan, options, rows, (saved.lse, grads.lse), Share(problem), call.modifiers)
            tiles.take_keys(call.k, call.v)
            run_plan(planned.plan, tiles, options.ordered, chosen)
        else:
            tiles = run_in_legs(planned.plan, planned.legs, call, saved, grads)
        logits = None if call.sinks is None else call.sinks.detach().to(tiles.lse.dtype)
        dsinks = [] if logits is None else list(sink_gradients(tiles.lse, tiles.delta, logits))
        return (*tiles.gradients(), dsinks)


def _sum_in_order(parts: list[Tensor], sinks: Tensor | None) -> Tensor | None:
    """The sum over sequences, first to last, in the dtype of the sinks."""
    if sinks is None:
        return None
    total = sum_in_order(parts) if parts else torch.zeros(sinks.shape)
    return total.to(sinks.dtype)
