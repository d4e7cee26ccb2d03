"""One of several ranks that share a sequence, on a Hopper GPU: the forward of its queries, and its units of the backward."""

import hashlib
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from ...call.call import Call, Saved
from ...call.planning import DEFAULT_WORKERS
from ...masks import IntervalMask, Mask, Window
from ...scheduling.generators.shift import LARGEST_BLOCK
from ...scheduling.problem import Problem
from ...scheduling.ranks.sharding import Sharding
from ...scheduling.ranks.share import FILLINGS
from . import tiles
from .calls.forward import forward as forward_of_batch
from .calls.rank_backward import RankBackward, tile_size
from .driver.compile import OPTIONS, sources
from .driver.launch import usual_origin
from .support import check_shared_mask, refuse_modifiers

__all__ = ["RankBackward", "backward_tiles", "forward", "heads_together", "machine_code", "tile_size"]


def backward_tiles(head_dim: int, value_dim: int) -> tuple[int, int]:
    """Rows of a Q tile and of a KV tile."""
    found = tiles.backward_tiles(*tiles.backward_dims(head_dim, value_dim))
    return found.q_rows, found.kv_rows


def heads_together(problem: Problem, sharding: Sharding) -> int:
    """As many as give every SM some chains, dealt evenly to turns (scheduling/ranks/share.py): but from the shape alone, because
    the kernels' units have the KV tiles of a chunk, or a block of them where every tile is kept."""
    full = bool(problem.kept.all())
    chains = max(1, min(sharding.lengths) // problem.tile_kv)
    heads = problem.batch * -(-problem.all_parts // (1 if full else 2))  # of a kind
    enough = max(1, round(FILLINGS * DEFAULT_WORKERS / (min(chains, LARGEST_BLOCK) if full else chains)))
    if full:
        enough = min(enough, max(1, heads // sharding.ranks))
    turns = max(1, round(heads / enough))
    return -(-heads // turns)


def machine_code() -> str:
    """Sources, options and compiler decide what the kernels compute."""
    return f"kernels {_sources_hash()}, {usual_origin()}"


@cache
def _sources_hash() -> str:
    digest = hashlib.sha256()
    for part in (*OPTIONS, *(f"{name}\0{text}" for name, text in sorted(sources().items()))):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]


def forward(call: Call, problem: Problem, sharding: Sharding, rank: int) -> Saved:
    """Of the rank's queries, chunk by chunk, each a call of its own with the bits of the whole. k and v are those of the whole sequence.
    Options that come with modifiers are refused."""
    (q, k, v), options = call.tensors, call.options
    check_shared_mask(options.mask)
    refuse_modifiers(options, "ranks that share a sequence")
    outs, begin = [], 0
    for chunk in sharding.chunks_of(rank):
        rows = sharding.rows_of_chunk(chunk)
        mask, keys = mask_of_rows(options.mask, rows, sharding.rows)
        own = replace(options, mask=mask, schedule="auto")  # a forward needs no schedule
        outs.append(forward_of_batch(Call(q[:, begin : begin + len(rows)], k[:, :keys], v[:, :keys], own, sinks=call.sinks)))
        begin += len(rows)
    if len(outs) == 1:
        return outs[0]
    return Saved(torch.cat([out for out, _ in outs], dim=1), torch.cat([lse for _, lse in outs], dim=2))


@dataclass(frozen=True)
class RowsOfMask(IntervalMask):
    """Queries from `start` on of a sequence of `length` rows, on all its keys."""

    mask: IntervalMask
    start: int
    length: int

    def row_bounds(self, rows: NDArray[np.int64], q_len: int, kv_len: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return self.mask.row_bounds(rows + self.start, self.length, self.length)

    def __str__(self) -> str:
        return f"{self.mask} from row {self.start} of {self.length} on"


def mask_of_rows(mask: Mask, rows: range, length: int) -> tuple[Mask, int]:
    """The mask of some queries of a sequence, and how many keys it is for.

    The last query of a band is aligned with the last key of a call. A key that no row attends changes no bit, so the keys may end
    anywhere behind the last one that does.
    """
    if mask.is_full:
        return mask, length
    if mask.is_causal:
        return mask, rows.stop
    if mask.sides is None:
        assert isinstance(mask, IntervalMask)
        return RowsOfMask(mask, rows.start, length), length
    left, right = mask.sides
    keys = length if right < 0 else min(length, rows.stop + right)
    ahead = keys - rows.stop
    return Window(-1 if left < 0 else left + ahead, -1 if right < 0 else right - ahead), keys
