"""Boolean matrices that a benchmark attends with, by name, the same in every run; and what a new one costs the host, once."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dash_attn import BooleanMask, Mask, flash_attn_func, parse_mask
from dash_attn.masks import EMPTY
from dash_attn.tools.bench.candidates import Candidate, Tensors
from dash_attn.tools.bench.shape import OTHER_MASKS, DrawnMask, Shape

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

    def elements(self, q_len: int, kv_len: int) -> Bools:
        return _drawn(self, q_len, kv_len)

    def mask(self, q_len: int, kv_len: int) -> BooleanMask:
        """Made once, as one makes it for many steps."""
        return _packed(self, q_len, kv_len)

    def touched(self, q_len: int, kv_len: int) -> int:
        """Elements of all tiles that have one that is kept."""
        return int((self.tile_map(q_len, kv_len, TILE, TILE) != EMPTY).sum()) * TILE * TILE

    def tile_map(self, q_len: int, kv_len: int, tile_q: int, tile_kv: int) -> NDArray[np.uint8]:
        return self.mask(q_len, kv_len).pattern.tile_map(q_len, kv_len, tile_q, tile_kv)

    def keep(self, q: slice, kv: slice, q_len: int, kv_len: int) -> Bools:
        return self.elements(q_len, kv_len)[q, kv]

    def __str__(self) -> str:
        size = self.name.partition(":")[2]
        return {"elements": "random elements, half of them", "tree": "branches of a tree"}.get(
            self.name, f"random blocks of {size} x {size}, half of them"
        )


@lru_cache(maxsize=2)
def _drawn(matrix: Matrix, q_len: int, kv_len: int) -> Bools:
    name, _, size = matrix.name.partition(":")
    return DRAWN[name](np.random.default_rng(matrix.seed), q_len, kv_len, int(size or 1))


@lru_cache(maxsize=4)
def _packed(matrix: Matrix, q_len: int, kv_len: int) -> BooleanMask:
    return BooleanMask(matrix.elements(q_len, kv_len))


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
