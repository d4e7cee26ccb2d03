"""Random problems, orders and machines for property tests. Examples are derived from the test itself: every run sees the same ones."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from dash_attn.masks import Causal, Documents, Full, Mask, Prefix, TileMap, Window
from dash_attn.scheduling.engine import Costs
from dash_attn.scheduling.order import HeadOrder, Order, turn_within
from dash_attn.scheduling.problem import Problem


def examples(count: int) -> settings:
    return settings(max_examples=count, deadline=None, derandomize=True)


seeds = st.integers(0, 2**32 - 1)
widths = st.integers(-1, 40)
costs = st.builds(Costs, st.integers(1, 4), st.integers(0, 4), st.integers(0, 6), st.integers(0, 3), st.integers(0, 3))


@st.composite
def sized_masks(draw: st.DrawFn, most: int = 40) -> tuple[Mask, int, int]:
    """A mask and lengths (q_len, kv_len) it fits."""
    kv_len = draw(st.integers(1, most))
    form = draw(st.sampled_from(["full", "causal", "window", "prefix", "documents", "blocks"]))
    q_len = kv_len if form == "documents" else draw(st.integers(1, most))
    if form == "documents":
        cuts = sorted(draw(st.sets(st.integers(1, kv_len), max_size=5)) | {kv_len})
        return Documents(tuple(np.diff([0, *cuts]).tolist()), draw(st.booleans())), q_len, kv_len
    if form == "blocks":
        block_q, block_kv = draw(st.integers(1, 20)), draw(st.integers(1, 20))
        shape = (-(-q_len // block_q), -(-kv_len // block_kv))
        return TileMap(np.random.default_rng(draw(seeds)).random(shape) < 0.5, block_q, block_kv), q_len, kv_len
    masks = {
        "full": Full(),
        "causal": Causal(),
        "window": Window(draw(widths), draw(widths)),
        "prefix": Prefix(draw(st.integers(0, kv_len))),
    }
    return masks[form], q_len, kv_len


@st.composite
def problems(draw: st.DrawFn, most_tokens: int = 40) -> Problem:
    """Any mask on a few tiles, with odd sizes, groups of heads in any number of parts, a batch and a head offset."""
    mask, q_len, kv_len = draw(sized_masks(most_tokens))
    tile_q, tile_kv = draw(st.integers(3, 12)), draw(st.integers(3, 12))
    heads, group, batch, offset = (draw(st.integers(least, most)) for least, most in ((1, 3), (1, 4), (1, 2), (0, 1)))
    return Problem(mask, q_len, kv_len, tile_q, tile_kv, heads, group, batch, offset, group_parts=draw(st.integers(0, group)))


def acyclic_order(problem: Problem, rng: np.random.Generator) -> HeadOrder:
    """Walks and turns that follow one random sequence of all tasks, so that some execution completes."""
    q_tile, chain = np.nonzero(problem.kept)
    when = rng.permutation(len(chain))
    sequence = np.lexsort((when, chain))
    first_step = rng.integers(0, 2 * problem.q_tiles, problem.kv_tiles)  # decides the slack, which must not mislead a proof
    return _order(chain[sequence], q_tile[sequence], when[sequence], first_step)


def any_order(problem: Problem, rng: np.random.Generator) -> HeadOrder:
    """Random walks and, independently, random turns: often a cycle."""
    q_tile, chain = np.nonzero(problem.kept)
    sequence = np.lexsort((rng.permutation(len(chain)), chain))
    first_step = rng.integers(0, 2 * problem.q_tiles, problem.kv_tiles)
    return _order(chain[sequence], q_tile[sequence], rng.permutation(len(chain)), first_step)


def _order(chain: np.ndarray, q_tile: np.ndarray, when: np.ndarray, first_step: np.ndarray) -> HeadOrder:
    return HeadOrder.build(chain, q_tile, turn_within(q_tile, when), first_step)


def one_or_two_kinds(problem: Problem, rng: np.random.Generator) -> Order:
    make = acyclic_order if rng.random() < 0.8 else any_order
    return Order("random", tuple(make(problem, rng) for _ in range(rng.integers(1, 3))))
