"""One of several ranks that share a sequence, on a Hopper GPU: the forward of its queries, and its units of the backward."""

from __future__ import annotations

import hashlib
from functools import cache

from ...call.call import Call, Saved
from ...call.planning import DEFAULT_WORKERS
from ...scheduling.generators.shift import LARGEST_BLOCK
from ...scheduling.problem import Problem
from ...scheduling.ranks.sharding import Sharding
from ...scheduling.ranks.share import FILLINGS
from . import tiles
from .calls.rank_backward import RankBackward, tile_size
from .calls.rank_forward import forward as forward_of_rows
from .driver.compile import OPTIONS, sources
from .driver.launch import usual_origin

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
    """Of the rank's queries. k and v are those of the whole sequence. Options that come with modifiers are refused."""
    return forward_of_rows(call, sharding, rank)
