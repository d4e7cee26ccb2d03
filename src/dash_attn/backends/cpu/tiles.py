"""The arithmetic of attention on the CPU, tile by tile.

Memory is linear in the lengths. Every product is a 2-d product of two contiguous tiles of a fixed shape on one
thread, so that bits cannot depend on the batch, other heads, strides or the number of threads.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...call.call import Call, Modifiers, Saved
from ...call.dropout import Dropout, threshold_of
from ...call.options import AttentionOptions
from ...execution.rules import ChainPlace, Contribution, Coroutine, Ending, SumPlace
from ...masks import EMPTY, PARTIAL, Mask, TilePattern
from ...scheduling.order import Ints
from ...scheduling.plan import Plan
from ...scheduling.problem import Problem, Task
from ...scheduling.ranks.sharding import Sharding

TILE_Q, TILE_KV = 64, 128
State = tuple[Tensor, Tensor]  # dK and dV of a chain so far; dK lacks the scale


class Share:
    """The tiles of queries and of keys that a rank has, in the order in which they are kept; all of them where it is alone. The last one
    may be short."""

    def __init__(self, problem: Problem, sharding: Sharding | None = None, rank: int = 0) -> None:
        sharding = sharding or Sharding((problem.q_len,), (0,))
        chunks = sharding.chunk_of_tiles(problem.tile_q), sharding.chunk_of_kv_tiles(problem)
        self.q_tiles, self.kv_tiles = (np.flatnonzero(np.isin(of_tiles, sharding.chunks_of(rank))).tolist() for of_tiles in chunks)
        self.place_of_q_tile = {tile: place for place, tile in enumerate(self.q_tiles)}
        self.place_of_kv_tile = {tile: place for place, tile in enumerate(self.kv_tiles)}
        self.queries = sum(min(problem.tile_q, problem.q_len - tile * problem.tile_q) for tile in self.q_tiles)
        self.keys = sum(min(problem.tile_kv, problem.kv_len - tile * problem.tile_kv) for tile in self.kv_tiles)


class TilePlace(NamedTuple):
    """A tile of a query head. `head` counts among those of the tensors."""

    sequence: int
    head: int
    q_tile: int
    kv_tile: int


class Scores:
    """Scaled, capped, biased and masked scores of one tile, and which of its weights dropout keeps."""

    def __init__(self, problem: Problem, options: AttentionOptions, modifiers: Modifiers | None = None) -> None:
        self.problem, self.scale, self.cap = problem, options.scale, options.softcap
        modifiers = modifiers or Modifiers()
        self.slopes, self.elements = modifiers.slopes, modifiers.elements
        self.dropout: Dropout | None = None
        if options.dropout_p:
            assert modifiers.seeds is not None
            first_head = problem.head_offset * problem.group + modifiers.first_head
            self.dropout = Dropout(threshold_of(options.dropout_p), tuple(modifiers.seeds.tolist()), first_head)

    @property
    def rescale(self) -> float:
        """Of weights that dropout kept."""
        return 1.0 if self.dropout is None else self.dropout.rescale

    def kept(self, at: TilePlace) -> Tensor | None:
        """Which weights dropout keeps; None where there is none."""
        if self.dropout is None:
            return None
        rows = range(at.q_tile * TILE_Q, (at.q_tile + 1) * TILE_Q)
        columns = range(at.kv_tile * TILE_KV, (at.kv_tile + 1) * TILE_KV)
        return torch.from_numpy(self.dropout.kept(at.sequence, at.head, rows, columns))

    def tile(self, q: Tensor, k: Tensor, at: TilePlace, partial: bool) -> tuple[Tensor, Tensor | None]:
        """Scores, and the tanh of the softcap where there is one (its slope is 1 - tanh^2)."""
        scores = torch.mm(q, k.t())
        tanh = None
        if self.cap:
            tanh = scores.mul_(self.scale / self.cap).tanh_()
            scores = tanh * self.cap
        else:
            scores.mul_(self.scale)
        problem = self.problem
        if self.slopes is not None:
            slope = self.slopes[at.head] if self.slopes.ndim == 1 else self.slopes[at.sequence, at.head]
            distances = _distances(problem.kv_len - problem.q_len, at.q_tile, at.kv_tile)
            scores.sub_(torch.from_numpy(distances).to(scores.dtype).mul_(slope.detach().to(scores.dtype)))
        if partial:
            scores.masked_fill_(torch.from_numpy(self._dropped(at)), -torch.inf)
        return scores, tanh

    def _dropped(self, at: TilePlace) -> NDArray[np.bool_]:
        """Elements of a tile that do not attend. For reading only."""
        problem = self.problem
        if self.elements is None or not isinstance(problem.mask, TilePattern):
            return _dropped_by_rule(problem.mask, problem.q_len, problem.kv_len, at.q_tile, at.kv_tile)
        rows, columns = _inside(problem.q_len, problem.kv_len, at.q_tile, at.kv_tile)
        return _whole_tile(self.elements.of(at.sequence, at.head).keep(rows, columns))  # not kept: the bits are there already


@lru_cache(maxsize=1024)  # 8 MiB: other heads, the backward and the next step ask for the same tiles
def _dropped_by_rule(mask: Mask, q_len: int, kv_len: int, q_tile: int, kv_tile: int) -> NDArray[np.bool_]:
    return _whole_tile(mask.keep(*_inside(q_len, kv_len, q_tile, kv_tile), q_len, kv_len))


def _inside(q_len: int, kv_len: int, q_tile: int, kv_tile: int) -> tuple[slice, slice]:
    """Rows and columns of a tile, as far as the lengths go."""
    rows = slice(q_tile * TILE_Q, min((q_tile + 1) * TILE_Q, q_len))
    return rows, slice(kv_tile * TILE_KV, min((kv_tile + 1) * TILE_KV, kv_len))


def _whole_tile(keep: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """What does not attend: what is not kept, and what is beyond the lengths."""
    dropped = np.ones((TILE_Q, TILE_KV), dtype=np.bool_)
    dropped[: keep.shape[0], : keep.shape[1]] = ~keep
    return dropped


@lru_cache(maxsize=256)
def _distances(ahead: int, q_tile: int, kv_tile: int) -> NDArray[np.int64]:
    """Between the queries and the keys of a tile; the last query is at the last key. For reading only."""
    rows = np.arange(q_tile * TILE_Q, (q_tile + 1) * TILE_Q, dtype=np.int64) + ahead
    columns = np.arange(kv_tile * TILE_KV, (kv_tile + 1) * TILE_KV, dtype=np.int64)
    distances: NDArray[np.int64] = np.abs(rows[:, None] - columns)
    return distances


def attend(q: Tensor, k_tiles: Tensor, v_tiles: Tensor, sink: Tensor, scores: Scores, at: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Output and LSE of one Q tile: online softmax over its sink (a score without a value; -inf: none) and its KV tiles, in order.

    at: sequence, query head and Q tile.
    """
    highest = sink.repeat(TILE_Q)
    total = (highest != -torch.inf).to(q.dtype)
    out = q.new_zeros(TILE_Q, v_tiles.shape[-1])
    kinds = scores.problem.tile_map[at[2]]
    for kv_tile in np.flatnonzero(kinds != EMPTY).tolist():
        place = TilePlace(*at, kv_tile)
        tile, _ = scores.tile(q, k_tiles[kv_tile], place, kinds[kv_tile] == PARTIAL)
        before, highest = highest, torch.maximum(highest, tile.amax(1))
        base = highest.masked_fill(highest == -torch.inf, 0)  # a row that attends to nothing yet: exp(-inf - 0) is 0, not NaN
        weights = tile.sub_(base[:, None]).exp_()
        fade = torch.exp(before - base)
        total = total * fade + weights.sum(1)  # of all weights: dropout comes behind the softmax
        kept = scores.kept(place)
        if kept is not None:
            weights.mul_(kept)
        out.mul_(fade[:, None]).addmm_(weights, v_tiles[kv_tile])
    nothing = total == 0
    out.div_(total[:, None]).masked_fill_(nothing[:, None], 0)
    if scores.dropout is not None:
        out.mul_(scores.rescale)
    return out, (highest + total.log()).masked_fill_(nothing, -torch.inf)


def forward_of_share(call: Call, problem: Problem, share: Share) -> Saved:
    """The queries of a share on all keys of the problem."""
    (q, k, v), sinks = call.tensors, call.sinks
    with fixed_arithmetic():
        scores = Scores(problem, call.options, call.modifiers)
        q_tiles, k_tiles, v_tiles = to_tiles(q, TILE_Q), to_tiles(k, TILE_KV), to_tiles(v, TILE_KV)
        sink_of = q_tiles.new_full((q.shape[2],), -torch.inf) if sinks is None else sinks.detach().to(q_tiles.dtype)
        out = q_tiles.new_empty(*q_tiles.shape[:-1], v.shape[-1])
        lse = q_tiles.new_empty(q_tiles.shape[:-1])
        for place in product(*map(range, q_tiles.shape[:3])):
            sequence, head, local = place
            kv_head, at = (sequence, head // problem.group), (sequence, head, share.q_tiles[local])
            out[place], lse[place] = attend(q_tiles[place], k_tiles[kv_head], v_tiles[kv_head], sink_of[head], scores, at)
        return Saved(from_tiles(out, q.shape[1], q.dtype), lse.flatten(2)[:, :, : q.shape[1]].contiguous())


class BackwardTiles:
    """The arithmetic of the backward pass; the executor decides when each piece runs. dQ and dK lack the scale, dV that of dropout.

    Queries, dQ and the sums of dK and dV are those of a share. `keys` has all keys and values of the KV heads that are worked on.
    """

    def __init__(
        self,
        plan: Plan,
        options: AttentionOptions,
        rows: tuple[Tensor, ...],
        of_rows: tuple[Tensor, Tensor | None],
        share: Share,
        modifiers: Modifiers | None = None,
    ) -> None:
        """rows: dout, q and out of the share; of_rows: its LSE and, where it was used, the gradient of that."""
        self.problem, self.share, self.scale, self.dtype = plan.problem, share, options.scale, rows[1].dtype
        self.scores = Scores(plan.problem, options, modifiers)
        dout, q, out = rows
        self.q, self.dout = to_tiles(q, TILE_Q), to_tiles(dout, TILE_Q)
        self.keys: dict[int, tuple[Tensor, Tensor]] = {}  # by KV head: tiles (batch, KV tiles, rows, dim)
        lse, dlse = of_rows
        self.lse = self._rows_by_tile(lse.masked_fill(lse == -torch.inf, torch.inf), torch.inf)
        self.delta = self._delta(to_tiles(out, TILE_Q))
        if dlse is not None:
            # The derivative of the LSE by a score is that score's weight, as for delta but with the opposite sign.
            # Rows without a weight have none.
            self.delta -= self._rows_by_tile(dlse.masked_fill(lse == -torch.inf, 0), 0.0)
        self.dq = torch.empty_like(self.q)
        self.dq[:, :, [plan.turns_per_q_tile[tile] == 0 for tile in share.q_tiles]] = 0
        tiles = (plan.problem.batch, plan.problem.heads, len(share.kv_tiles), TILE_KV)
        dims = q.shape[-1], dout.shape[-1]
        self.sums = [tuple(self.q.new_empty(*tiles, dim) for dim in dims) for _ in range(plan.sums)]

    def take_keys(self, k: Tensor, v: Tensor, first_head: int = 0) -> None:
        """All keys and values of some KV heads."""
        for head, (k_tiles, v_tiles) in enumerate(zip(to_tiles(k, TILE_KV).unbind(1), to_tiles(v, TILE_KV).unbind(1), strict=True)):
            self.keys[first_head + head] = k_tiles, v_tiles

    def _rows_by_tile(self, values: Tensor, beyond: float) -> Tensor:
        """A number per row, by Q tile. An LSE of +inf, of rows that attend to nothing, makes their weights exp(-inf) = 0."""
        padded = self.q.new_full((*values.shape[:2], len(self.share.q_tiles) * TILE_Q), beyond)
        padded[:, :, : values.shape[2]] = values
        by_tile: Tensor = padded.unflatten(2, (-1, TILE_Q))
        return by_tile

    def _delta(self, out: Tensor) -> Tensor:
        """Row sums of dO * O."""
        delta = torch.empty_like(self.lse)
        for place in product(*map(range, delta.shape[:3])):
            delta[place] = (self.dout[place] * out[place]).sum(1)
        return delta

    def chain(self, at: ChainPlace, steps: Ints, members: list[int]) -> Coroutine:
        """Walk one KV tile's Q tiles; dK and dV stay with the chain to its end."""
        k, v = self._tiles_of(at)
        state = torch.zeros_like(k), torch.zeros_like(v)
        for member in members:
            yield from self.walk(at, steps, member, state)
        yield Ending(state)

    def walk(self, at: ChainPlace, steps: Ints, member: int, state: State) -> Coroutine:
        """Walk some Q tiles for one query head. dK and dV are added to the state, in its memory."""
        k, v = self._tiles_of(at)
        dk, dv = state
        head = self.problem.members(at.part).start + member
        for q_tile, turn, partial in steps.tolist():
            place = at.sequence, head, self.share.place_of_q_tile[q_tile]
            weights, dscores = self._gradients(place, k, v, TilePlace(at.sequence, head, q_tile, at.kv_tile), bool(partial))
            dv.addmm_(weights.t(), self.dout[place])
            dk.addmm_(dscores.t(), self.q[place])
            yield Contribution(member, q_tile, turn, torch.mm(dscores, k))

    def _tiles_of(self, at: ChainPlace) -> tuple[Tensor, Tensor]:
        k, v = self.keys[at.part // self.problem.parts]
        return k[at.sequence, at.kv_tile], v[at.sequence, at.kv_tile]

    def _gradients(self, place: tuple[int, int, int], k: Tensor, v: Tensor, at: TilePlace, partial: bool) -> tuple[Tensor, Tensor]:
        """P, as far as it is kept, and dS of one tile; dS before the scale."""
        scores, tanh = self.scores.tile(self.q[place], k, at, partial)
        weights = scores.sub_(self.lse[place][:, None]).exp_()
        dweights, kept = torch.mm(self.dout[place], v.t()), self.scores.kept(at)
        if kept is not None:
            dweights.mul_(kept).mul_(self.scores.rescale)
        dscores = dweights.sub_(self.delta[place][:, None]).mul_(weights)
        if tanh is not None:
            dscores.mul_(1 - tanh * tanh)
        return weights if kept is None else weights.mul_(kept), dscores

    def land(self, task: Task, value: Any, first: bool) -> None:
        tile = self.dq[task.sequence, task.head, self.share.place_of_q_tile[task.q_tile]]
        if first:
            tile.copy_(value)
        else:
            tile.add_(value)

    def land_sum(self, place: SumPlace, value: State, first: bool) -> None:
        tile = place.sequence, place.kv_head, self.share.place_of_kv_tile[place.kv_tile]
        for total, part in zip(self.sums[place.number], value, strict=True):
            total[tile] = part if first else total[tile] + part

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK and dV of the share's rows."""
        queries, keys, scale, dtype = self.share.queries, self.share.keys, self.scale, self.dtype
        dk, dv = self.sums[0]
        for more_dk, more_dv in self.sums[1:]:  # of the kinds
            dk, dv = dk + more_dk, dv + more_dv
        if self.scores.dropout is not None:
            dv = dv * self.scores.rescale
        return from_tiles(self.dq * scale, queries, dtype), from_tiles(dk * scale, keys, dtype), from_tiles(dv, keys, dtype)


def sink_gradients(lse: Tensor, delta: Tensor, sinks: Tensor) -> Tensor:
    """The part of each sequence and query head, tile by tile: a sink takes exp(sink - LSE) of a row's weight and has value 0.

    lse and delta are those of all rows, by Q tile.
    """
    parts = sinks.new_zeros(lse.shape[:2])
    for sequence, head, q_tile in product(*map(range, lse.shape[:3])):
        share = torch.exp(sinks[head] - lse[sequence, head, q_tile])
        parts[sequence, head] -= (share * delta[sequence, head, q_tile]).sum()
    return parts


def to_tiles(x: Tensor, rows: int) -> Tensor:
    """(batch, length, heads, dim) -> contiguous tiles (batch, heads, tiles, rows, dim) for the arithmetic, zero-padded."""
    batch, length, heads, dim = x.shape
    tiles = -(-length // rows)
    padded = torch.zeros(batch, heads, tiles * rows, dim, dtype=arithmetic(x.dtype), device="cpu")
    padded[:, :, :length] = x.detach().transpose(1, 2)
    by_tile: Tensor = padded.unflatten(2, (tiles, rows))
    return by_tile


def from_tiles(tiles: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The inverse of to_tiles, in the caller's dtype."""
    return tiles.flatten(2, 3)[:, :, :length].transpose(1, 2).to(dtype).contiguous()


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


_lock = threading.Lock()
_callers = 0
_threads_before = 1


@contextmanager
def fixed_arithmetic() -> Iterator[None]:
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
