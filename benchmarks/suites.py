"""The suites beside those of `dash-attn bench`: the shapes of papers, of models, of ranks, of masks, of servers.

And the boolean matrices that shapes name, the same in every run; with what a new one costs the host, once.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dash_attn import BooleanMask, Mask, flash_attn_func, parse_mask
from dash_attn.masks import EMPTY
from dash_attn.tools.bench.candidates import Candidate, Tensors
from dash_attn.tools.bench.shape import MASKS, OTHER_MASKS, TOKENS, DrawnMask, Numbers, Shape, Shapes, Suite
from dash_attn.tools.bench.shape import SUITES as SHORT
from dash_attn.tools.bench.shape import choose as chosen

# ---- boolean matrices

TILE = 128  # operations are those of the tiles of so many rows and columns that a matrix touches
BRANCHES = (100, 400)  # tokens of a branch of a tree, from and to
Bools = NDArray[np.bool_]
WARM = 3  # runs with a known mask, of which the fastest counts


@dataclass(frozen=True)
class Matrix(DrawnMask):
    """`blocks:N` keeps half of the blocks of N x N, `elements` half of the elements; `tree`: tokens attend their branch of a tree."""

    name: str
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> Mask:
        """Any mask, or an error."""
        return cls(text) if re.fullmatch(r"blocks:[1-9]\d*|elements|tree", text) else parse_mask(text)

    @lru_cache(maxsize=2)  # noqa: B019 (only the last ones are kept)
    def elements(self, q_len: int, kv_len: int) -> Bools:
        name, _, size = self.name.partition(":")
        return DRAWN[name](np.random.default_rng(self.seed), q_len, kv_len, int(size or 1))

    @lru_cache(maxsize=4)  # noqa: B019
    def mask(self, q_len: int, kv_len: int) -> BooleanMask:
        """Made once, as one makes it for many steps."""
        return BooleanMask(self.elements(q_len, kv_len))

    def touched(self, q_len: int, kv_len: int) -> int:
        """Elements of all tiles that have one that is kept."""
        return int((self.tile_map(q_len, kv_len, TILE, TILE) != EMPTY).sum()) * TILE * TILE

    def tile_map(self, q_len: int, kv_len: int, tile_q: int, tile_kv: int) -> NDArray[np.uint8]:
        return self.mask(q_len, kv_len).pattern.tile_map(q_len, kv_len, tile_q, tile_kv)

    def keep(self, q: slice, kv: slice, q_len: int, kv_len: int) -> Bools:
        return self.elements(q_len, kv_len)[q, kv]

    def __str__(self) -> str:
        size = self.name.partition(":")[2]
        named = {"elements": "random elements, half of them", "tree": "branches of a tree"}
        return named.get(self.name, f"random blocks of {size} x {size}, half of them")


def _blocks(source: np.random.Generator, q_len: int, kv_len: int, size: int) -> Bools:
    """Some of the blocks of each row, so that each query attends something."""
    rows, columns = -(-q_len // size), -(-kv_len // size)
    ranks = np.argsort(source.random((rows, columns)), axis=1)
    kept: Bools = ranks < max(1, columns // 2)
    return np.repeat(np.repeat(kept, size, 0)[:q_len], size, 1)[:, :kv_len]


def _elements(source: np.random.Generator, q_len: int, kv_len: int, size: int) -> Bools:
    drawn = np.frombuffer(source.bytes(q_len * -(-kv_len // 8)), dtype=np.uint8).reshape(q_len, -1)
    kept: Bools = np.unpackbits(drawn, axis=1)[:, :kv_len].view(np.bool_)
    return kept


def _tree(source: np.random.Generator, q_len: int, kv_len: int, size: int) -> Bools:
    """Each branch begins where an earlier one ends. A token attends the branches up to the root, and its own up to itself."""
    ends = np.cumsum(source.integers(*BRANCHES, size=kv_len // BRANCHES[0] + 1))
    branch = np.searchsorted(ends, np.arange(kv_len), side="right")
    above = np.zeros((branch[-1] + 1,) * 2, dtype=np.bool_)
    for number in range(1, len(above)):
        parent = int(source.integers(number))
        above[number] = above[parent]
        above[number, parent] = True
    kept: Bools = above[branch][:, branch]
    kept |= (branch[:, None] == branch) & np.tri(kv_len, dtype=np.bool_)
    return kept[kv_len - q_len :]


DRAWN: dict[str, Callable[[np.random.Generator, int, int, int], Bools]] = {"blocks": _blocks, "elements": _elements, "tree": _tree}
OTHER_MASKS |= dict.fromkeys(DRAWN, Matrix.parse)


def with_planning(candidate: Candidate) -> Candidate:
    """Our default mode, which also tells what a new matrix costs."""
    identify = candidate.identify
    assert identify is not None

    def told(shape: Shape, tensors: Tensors) -> dict[str, Any]:
        said = identify(shape, tensors)
        if said and isinstance(shape.attended, Matrix):
            said["planning_ms"] = planning_ms(shape.attended, tensors[:4], {"softcap": shape.softcap, "backend": said["backend"]})
        return said

    return replace(candidate, identify=told)


def planning_ms(matrix: Matrix, tensors: tuple[Tensor, ...], options: dict[str, Any]) -> dict[str, float]:
    """Milliseconds beyond those of a mask that is known: `mask` is BooleanMask(tensor); `forward` and `backward` the first of each with a
    new pattern; `elements` the same three with a pattern that is known, as long as its plan is kept."""
    *inputs, dout = tensors
    q, k, v = leaves = tuple(x.detach().requires_grad_() for x in inputs)
    lengths = q.shape[1], k.shape[1]
    drawn = torch.from_numpy(replace(matrix, seed=matrix.seed + 1).elements(*lengths)).to(q.device)
    times: dict[str, float] = {}

    def run(mask: BooleanMask) -> tuple[float, float]:
        out, forward = _timed(lambda: flash_attn_func(q, k, v, mask=mask, **options))
        return forward, _timed(lambda: torch.autograd.grad(out, leaves, dout))[1]

    mask, times["mask"] = _timed(lambda: BooleanMask(drawn))
    first = run(mask)
    warm = [min(some) for some in zip(*(run(mask) for _ in range(WARM)), strict=True)]
    times["forward"], times["backward"] = (max(0.0, one - other) for one, other in zip(first, warm, strict=True))
    again, made = _timed(lambda: BooleanMask(drawn))
    times["elements"] = made + max(0.0, sum(run(again)) - sum(warm))
    return {name: round(value, 3) for name, value in times.items()}


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    torch.cuda.synchronize()
    began = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return result, 1e3 * (time.perf_counter() - began)


# ---- suites


@dataclass(frozen=True)
class Cases:
    """Cases that form no grid."""

    cases: tuple[Shape, ...]

    def shapes(self) -> list[Shape]:
        return list(self.cases)

    def chosen(self, name: str, seqlens: Numbers, head_dims: Numbers, masks: tuple[str, ...] | None) -> list[Shape]:
        """The lists keep the cases that fit."""

        def fits(shape: Shape) -> bool:
            each = (seqlens, shape.seqlen), (head_dims, shape.head_dim), (masks, shape.mask.partition(":")[0])
            return all(not wanted or one in wanted for wanted, one in each)

        found = list(filter(fits, self.cases))
        if not found:
            known = sorted({shape.mask.partition(":")[0] for shape in self.cases})
            raise ValueError(f"no case of suite {name} has these lengths, head dims and masks; its masks are {', '.join(known)}")
        return found


# Lengths as a packed batch of real texts has them: a few long, most short, none a multiple of a tile.
UNEQUAL = (4731, 3111, 2457, 1890, 1333, 1021, 777, 433, 300, 187, 95, 49)
DOCUMENTS = "documents:" + ",".join(map(str, UNEQUAL))
MASK_CASES = (
    Shape("window:4096,0", TOKENS, 1, 16, 16, 128),
    Shape("window:1024,0", TOKENS, 1, 16, 16, 128),
    Shape(DOCUMENTS, TOKENS, 1, 16, 16, 128),
    Shape("prefix:4096", TOKENS, 1, 16, 16, 128),
    Shape("causal", TOKENS, 1, 32, 8, 128, lengths=UNEQUAL),
    Shape("causal", 8192, 2, 8, 8, 256),
    Shape("full", 8192, 2, 8, 8, 256),
    Shape("causal", 8192, 2, 16, 16, 128, softcap=30.0),
    Shape("causal", TOKENS, 1, 64, 8, 64, sinks=True),
    # Boolean matrices, and the full mask that their tiles are compared with.
    *(Shape(mask, length, TOKENS // length, 16, 16, 128) for mask in ("full", "blocks:128") for length in (8192, TOKENS)),
    *(Shape(mask, 8192, 2, 16, 16, 128) for mask in ("elements", "tree")),
)
# What one rank of a real run has: few KV heads, wide heads, queries shorter than keys, small and packed batches.
RANK_CASES = (
    *(Shape("causal", length, 1, 8, 1, 128) for length in (4096, 8192, 16384)),  # Llama 70B on 8 tensor-parallel ranks
    Shape("causal", 8192, 1, 16, 1, 128),  # 405B
    Shape("causal", 32768, 1, 4, 1, 128),
    Shape("causal", 4096, 4, 8, 1, 128),
    Shape("causal", 4096, 2, 64, 8, 128),
    Shape("causal", 2048, 4, 28, 4, 128),
    Shape("causal", 16384, 1, 32, 8, 128),
    Shape("causal", 4096, 1, 71, 1, 128),
    *(Shape(mask, 8192, 2, 16, 16, 192, v_head_dim=128) for mask in MASKS),  # DeepSeek
    *(Shape(mask, 8192, 2, 8, 8, 256) for mask in MASKS),  # Gemma
    Shape("causal", 4096, 4, 8, 4, 256),
    Shape("causal", 8192, 2, 16, 16, 80),
    Shape("causal", 8192, 2, 16, 16, 128, q_seqlen=1024),
    Shape("causal", 16384, 1, 32, 8, 128, q_seqlen=2048),
    Shape("causal", 32768, 1, 32, 8, 128, q_seqlen=4096),
    Shape("full", 8192, 2, 16, 16, 128, q_seqlen=512),
    Shape("causal", 4096, 1, 8, 8, 64),
    Shape("full", 2048, 1, 16, 16, 64),
    Shape("full", TOKENS, 1, 16, 16, 128, lengths=UNEQUAL),
)
# Few heads of many tokens: what a head reads does not stay in the cache, and the GPU is at its power limit.
LONG_CASES = tuple(Shape("causal", length, 1, heads, heads, 128) for length, heads in ((16384, 8), (65536, 8), (131072, 2), (262144, 2)))
# Servers: one query per sequence, many sequences or few, keys in rows or pages; several queries that speculate; a window.
DECODE_CASES = (
    *(Shape("causal", keys, batch, 32, 8, 128, q_seqlen=1, cache="rows") for batch, keys in ((64, 4096), (128, 8192), (16, 8192))),
    *(Shape("causal", keys, batch, 32, 8, 128, q_seqlen=1, cache="rows") for batch, keys in ((1, 8192), (1, 32768), (4, 32768))),
    Shape("causal", 2048, 256, 64, 8, 128, q_seqlen=1, cache="rows"),
    Shape("causal", 32768, 16, 8, 1, 128, q_seqlen=1, cache="rows"),
    Shape("causal", 8192, 64, 32, 8, 64, q_seqlen=1, cache="rows"),
    *(Shape("causal", keys, batch, 32, 8, 128, q_seqlen=1, cache="pages:64") for batch, keys in ((64, 4096), (128, 8192), (1, 32768))),
    Shape("causal", 4096, 64, 32, 8, 128, q_seqlen=1, cache="pages:16"),
    Shape("causal", 4096, 64, 32, 8, 128, q_seqlen=4, cache="pages:64"),
    Shape("window:1024,0", 8192, 128, 32, 8, 128, q_seqlen=1, cache="pages:64"),
)
SUITES: dict[str, Shapes] = {
    "paper": Suite((512, 1024, 2048, 4096, 8192, 16384), (64, 128)),
    **SHORT,
    "llama": Suite((4096, 8192, 16384), (128,), ("causal",), ((32, 8), (64, 8), (128, 8))),  # 8B, 70B, 405B
    "masks": Cases(MASK_CASES),
    "ranks": Cases(RANK_CASES),
    "long": Cases(LONG_CASES),
    "decode": Cases(DECODE_CASES),
}
FLEX_SUITES = ("paper", "masks")  # FlexAttention compiles for many seconds per shape: not in the short ones
EQUAL_HEADS_SUITES = ("ranks",)
DECODE_SUITES = ("decode",)  # of caches: a forward only, and other candidates
choose = partial(chosen, SUITES)
