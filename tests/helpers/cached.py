"""Sequences that are played through a cache, piece by piece and beside each other, to be compared with their whole forward."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dash_attn import flash_attn_func, flash_attn_with_kvcache
from dense import same_bits

NAN = float("nan")


@dataclass(frozen=True)
class CacheCase:
    """page_size 0: rows of a plain cache. Everything that must not reach the bits is drawn by `seed`."""

    lengths: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    dtype: torch.dtype = torch.bfloat16
    page_size: int = 0
    most_padding: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    sinks: bool = False
    chunks: tuple[int, ...] = (1, 1, 1, 2, 5, 64, 100)
    seed: int = 0
    device: str = "cpu"


class Played:
    """Each sequence whole, and the same through a cache: `run` calls with random chunks of random sequences until all are done."""

    def __init__(self, case: CacheCase) -> None:
        self.case, self.random = case, random.Random(case.seed)
        torch.manual_seed(case.seed)
        (q_heads, kv_heads), (dim, v_dim) = case.heads, case.dims
        self.tensors = [
            tuple(self._draw(n, *shape) for shape in ((q_heads, dim), (kv_heads, dim), (kv_heads, v_dim))) for n in case.lengths
        ]
        self.sinks = torch.randn(q_heads, device=case.device) if case.sinks else None
        self.padding = [self.random.randint(0, case.most_padding) for _ in case.lengths]
        self._make_cache()
        self.out: list[list[Tensor]] = [[] for _ in case.lengths]
        self.lse: list[list[Tensor]] = [[] for _ in case.lengths]

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(1, *shape, device=self.case.device).to(self.case.dtype)

    def _make_cache(self) -> None:
        """Slots are NaN; pages are dealt at random, and table entries that nobody needs are no pages."""
        case, rows = self.case, max(self.case.lengths) + self.case.most_padding + self.random.randint(0, 40)
        count, size = len(case.lengths) + 2, rows
        if case.page_size:
            columns = -(-rows // case.page_size)
            count, size = columns * len(case.lengths) + 3, case.page_size
            dealt = self.random.sample(range(count), columns * len(case.lengths))
            table = torch.tensor(dealt, dtype=torch.int32).view(len(case.lengths), columns)
            for i, length in enumerate(case.lengths):
                table[i, -(-(length + self.padding[i]) // case.page_size) :] = -1
            self.table = table.to(case.device)
        self.rows = torch.tensor(self.random.sample(range(count), len(case.lengths)), dtype=torch.int32, device=case.device)
        shape = count, size, case.heads[1]
        self.caches = [torch.full((*shape, dim), NAN, dtype=case.dtype, device=case.device) for dim in case.dims]

    def whole(self, number: int) -> tuple[Tensor, Tensor]:
        """The forward of training."""
        q, k, v = self.tensors[number]
        out, lse = flash_attn_func(q, k, v, causal=True, sinks=self.sinks, return_lse=True, **self.case.options)
        return out, lse

    def run(self) -> None:
        done = [0] * len(self.case.lengths)
        while left := [i for i, length in enumerate(self.case.lengths) if done[i] < length]:
            chunk = min(self.random.choice(self.case.chunks), max(self.case.lengths[i] - done[i] for i in left))
            able = [i for i in left if self.case.lengths[i] - done[i] >= chunk]
            self.call(self.random.sample(able, self.random.randint(1, len(able))), done, chunk)

    def call(self, chosen: list[int], done: list[int], chunk: int) -> None:
        """One step of some sequences."""
        q, k, v = (torch.cat([self.tensors[i][which][:, done[i] : done[i] + chunk] for i in chosen]) for which in range(3))
        numbers = {"cache_seqlens": [done[i] + self.padding[i] for i in chosen]}
        if self.case.most_padding:
            numbers["cache_leftpad"] = [self.padding[i] for i in chosen]
        places = {name: torch.tensor(values, dtype=torch.int32, device=self.case.device) for name, values in numbers.items()}
        if self.case.page_size:
            places["block_table"] = self.table[chosen]
        else:
            places["cache_batch_idx"] = self.rows[chosen]
        options = {"causal": True, "sinks": self.sinks, "return_softmax_lse": True, **self.case.options}
        out, lse = flash_attn_with_kvcache(q, *self.caches, k, v, **places, **options)
        for place, i in enumerate(chosen):
            self.out[i].append(out[place : place + 1])
            self.lse[i].append(lse[place : place + 1])
            done[i] += chunk

    def differing(self) -> list[str]:
        """What has other bits than in the whole forward."""
        bad = []
        for i in range(len(self.case.lengths)):
            expected = self.whole(i)
            got = torch.cat(self.out[i], 1), torch.cat(self.lse[i], 2)
            bad += [f"{name} of sequence {i}" for name, a, b in zip(("out", "LSE"), got, expected, strict=True) if not same_bits(a, b)]
        return bad


def play(case: CacheCase) -> list[str]:
    played = Played(case)
    played.run()
    return played.differing()
