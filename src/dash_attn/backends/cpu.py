"""Attention on the CPU, tile by tile: the reference for what a GPU kernel computes and in which order.

Memory is linear in the lengths. Every product is a 2-d product of two contiguous tiles of a fixed shape on one
thread, so that bits cannot depend on the batch, other heads, strides or the number of threads.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..executor import Interleaving, Partial, Ticket, current_interleaving, execute
from ..explanation import Explanation
from ..masks import EMPTY, PARTIAL
from ..options import AttentionOptions
from ..order import Ints
from ..plan import Plan
from ..planning import DEFAULT_WORKERS, explanation_of, plan_for, problem_of
from ..problem import Problem, Task

TILE_Q, TILE_KV = 64, 128


def forward(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Output in the input's dtype, LSE in the dtype of the arithmetic."""
    problem = problem_of(q, k, options, TILE_Q, TILE_KV)
    with _fixed_arithmetic():
        scores = _Scores(problem, options)
        q_tiles, k_tiles, v_tiles = _pack(q, TILE_Q), _pack(k, TILE_KV), _pack(v, TILE_KV)
        out = q_tiles.new_empty(*q_tiles.shape[:-1], v.shape[-1])
        lse = q_tiles.new_empty(q_tiles.shape[:-1])
        for place in product(*map(range, q_tiles.shape[:3])):
            sequence, head, q_tile = place
            kv_head = sequence, head // problem.group
            out[place], lse[place] = _attend(q_tiles[place], k_tiles[kv_head], v_tiles[kv_head], scores, q_tile)
        return _unpack(out, problem.q_len, q.dtype), lse.flatten(2)[:, :, : problem.q_len].contiguous()


def backward_plan(q: Tensor, k: Tensor, options: AttentionOptions) -> Plan:
    return plan_for(problem_of(q, k, options, TILE_Q, TILE_KV), options.schedule, DEFAULT_WORKERS)


def explain(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, predict_time: bool = True) -> Explanation:
    """Times are never predicted: nobody trains on this backend."""
    tiles = (TILE_Q, TILE_KV)
    note = "the CPU backend is for reference, its time is not modelled"
    plan = backward_plan(q, k, options)
    return explanation_of(plan, "cpu", (q, k, v), options, backward_tiles=tiles, forward_tiles=tiles, prediction_note=note)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV in the inputs' dtype, summed in the order of the plan (or of arrival, where options say unordered)."""
    chosen = current_interleaving()
    if chosen is None:
        # "unordered" promises nothing, and the control must show it: every call arrives differently.
        chosen = Interleaving(None if options.ordered else secrets.randbits(64))
    problem = problem_of(q, k, options, TILE_Q, TILE_KV)
    plan = plan_for(problem, options.schedule, chosen.workers or DEFAULT_WORKERS)
    with _fixed_arithmetic():
        kernel = _Backward(problem, options, (dout, q, k, v, out), lse)
        kernel.dq[:, :, plan.ranks_per_q_tile == 0] = 0
        execute(plan, kernel, options.ordered, chosen)
        dq, dk, dv = kernel.dq * options.scale, kernel.dk * options.scale, kernel.dv
        return _unpack(dq, problem.q_len, q.dtype), _unpack(dk, problem.kv_len, k.dtype), _unpack(dv, problem.kv_len, v.dtype)


class _Scores:
    """Scaled, capped and masked scores of one tile."""

    def __init__(self, problem: Problem, options: AttentionOptions) -> None:
        self.problem, self.scale, self.cap = problem, options.scale, options.softcap

    def tile(self, q: Tensor, k: Tensor, q_tile: int, kv_tile: int, partial: bool) -> tuple[Tensor, Tensor | None]:
        """Scores, and the tanh of the softcap where there is one (its slope is 1 - tanh^2)."""
        scores = torch.mm(q, k.t())
        tanh = None
        if self.cap:
            tanh = scores.mul_(self.scale / self.cap).tanh_()
            scores = tanh * self.cap
        else:
            scores.mul_(self.scale)
        if partial:
            scores.masked_fill_(self._dropped(q_tile, kv_tile), -torch.inf)
        return scores, tanh

    def _dropped(self, q_tile: int, kv_tile: int) -> Tensor:
        """Elements of a tile that do not attend; those beyond the lengths never do."""
        problem = self.problem
        rows = slice(q_tile * TILE_Q, min((q_tile + 1) * TILE_Q, problem.q_len))
        columns = slice(kv_tile * TILE_KV, min((kv_tile + 1) * TILE_KV, problem.kv_len))
        dropped = np.ones((TILE_Q, TILE_KV), dtype=np.bool_)
        keep = problem.mask.keep(rows, columns, problem.q_len, problem.kv_len)
        dropped[: keep.shape[0], : keep.shape[1]] = ~keep
        return torch.from_numpy(dropped)


def _attend(q: Tensor, k_tiles: Tensor, v_tiles: Tensor, scores: _Scores, q_tile: int) -> tuple[Tensor, Tensor]:
    """Output and LSE of one Q tile: online softmax over its KV tiles, first to last."""
    highest = q.new_full((TILE_Q,), -torch.inf)
    total = q.new_zeros(TILE_Q)
    out = q.new_zeros(TILE_Q, v_tiles.shape[-1])
    kinds = scores.problem.tile_map[q_tile]
    for kv_tile in np.flatnonzero(kinds != EMPTY).tolist():
        tile, _ = scores.tile(q, k_tiles[kv_tile], q_tile, kv_tile, kinds[kv_tile] == PARTIAL)
        before, highest = highest, torch.maximum(highest, tile.amax(1))
        base = highest.masked_fill(highest == -torch.inf, 0)  # a row that attends nothing yet: exp(-inf - 0) is 0, not NaN
        weights = tile.sub_(base[:, None]).exp_()
        fade = torch.exp(before - base)
        total = total * fade + weights.sum(1)
        out.mul_(fade[:, None]).addmm_(weights, v_tiles[kv_tile])
    nothing = total == 0
    out.div_(total[:, None]).masked_fill_(nothing[:, None], 0)
    return out, (highest + total.log()).masked_fill_(nothing, -torch.inf)


class _Backward:
    """The arithmetic of the backward pass; the executor decides when each piece runs. dQ and dK lack the scale."""

    def __init__(self, problem: Problem, options: AttentionOptions, tensors: tuple[Tensor, ...], lse: Tensor) -> None:
        self.problem = problem
        self.scores = _Scores(problem, options)
        dout, q, k, v, out = tensors
        self.q, self.dout = _pack(q, TILE_Q), _pack(dout, TILE_Q)
        self.k, self.v = _pack(k, TILE_KV), _pack(v, TILE_KV)
        self.lse = self._pack_lse(lse)
        self.delta = self._delta(_pack(out, TILE_Q))
        self.dq, self.dk, self.dv = (torch.empty_like(tiles) for tiles in (self.q, self.k, self.v))

    def _pack_lse(self, lse: Tensor) -> Tensor:
        """LSE by Q tile. Rows that attend nothing get +inf, so that their weights are exp(-inf) = 0."""
        padded = self.q.new_full((*lse.shape[:2], self.problem.q_tiles * TILE_Q), torch.inf)
        padded[:, :, : self.problem.q_len] = lse.masked_fill(lse == -torch.inf, torch.inf)
        return padded.unflatten(2, (-1, TILE_Q))

    def _delta(self, out: Tensor) -> Tensor:
        """Row sums of dO * O."""
        delta = torch.empty_like(self.lse)
        for place in product(*map(range, delta.shape[:3])):
            delta[place] = (self.dout[place] * out[place]).sum(1)
        return delta

    def chain(self, ticket: Ticket, steps: Ints, members: list[int]) -> Iterator[Partial]:
        """Walk one KV tile's Q tiles; dK and dV stay with the chain."""
        k, v = self.k[ticket], self.v[ticket]
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        group = self.problem.group
        for member in members:
            for q_tile, rank, partial in steps.tolist():
                place = ticket.sequence, ticket.head * group + member, q_tile
                weights, dscores = self._gradients(place, k, v, ticket.kv_tile, bool(partial))
                dv.addmm_(weights.t(), self.dout[place])
                dk.addmm_(dscores.t(), self.q[place])
                yield Partial(member, q_tile, rank, torch.mm(dscores, k))
        self.dk[ticket], self.dv[ticket] = dk, dv

    def _gradients(self, place: tuple[int, int, int], k: Tensor, v: Tensor, kv_tile: int, partial: bool) -> tuple[Tensor, Tensor]:
        """P and dS of one tile, dS before the scale."""
        scores, tanh = self.scores.tile(self.q[place], k, place[2], kv_tile, partial)
        weights = scores.sub_(self.lse[place][:, None]).exp_()
        dscores = torch.mm(self.dout[place], v.t()).sub_(self.delta[place][:, None]).mul_(weights)
        if tanh is not None:
            dscores.mul_(1 - tanh * tanh)
        return weights, dscores

    def land(self, task: Task, value: Any, first: bool) -> None:
        tile = self.dq[task.sequence, task.head, task.q_tile]
        if first:
            tile.copy_(value)
        else:
            tile.add_(value)


def _pack(x: Tensor, rows: int) -> Tensor:
    """(batch, length, heads, dim) -> contiguous tiles (batch, heads, tiles, rows, dim) for the arithmetic, zero-padded."""
    batch, length, heads, dim = x.shape
    tiles = -(-length // rows)
    packed = torch.zeros(batch, heads, tiles * rows, dim, dtype=_arithmetic(x.dtype), device="cpu")
    packed[:, :, :length] = x.detach().transpose(1, 2)
    return packed.unflatten(2, (tiles, rows))


def _unpack(tiles: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The inverse of _pack, in the caller's dtype."""
    return tiles.flatten(2, 3)[:, :, :length].transpose(1, 2).to(dtype).contiguous()


def _arithmetic(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


_lock = threading.Lock()
_callers = 0
_threads_before = 1


@contextmanager
def _fixed_arithmetic() -> Iterator[None]:
    """One thread per product, because BLAS splits small products differently with more; no autocast, no gradients.

    Threads made inside inherit the count; calls that overlap on several threads restore what the first one found.
    """
    global _callers, _threads_before
    with _lock:
        if _callers == 0:
            _threads_before = torch.get_num_threads()
        _callers += 1
    torch.set_num_threads(1)
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            yield
    finally:
        with _lock:
            _callers -= 1
        torch.set_num_threads(_threads_before)
