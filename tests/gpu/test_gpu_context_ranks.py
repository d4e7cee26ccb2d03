"""Processes that share a sequence, and one GPU: states and keys go over gloo, through the host's memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dash_attn import Causal, Documents, Full, Mask, Window, flash_attn_func
from dash_attn.distributed import context_parallel_attention, shard
from processes import run_processes

pytestmark = pytest.mark.gpu
CASES: dict[str, tuple[int, tuple[int, int], tuple[int, int], Mask]] = {
    "causal": (4096, (8, 2), (128, 128), Causal()),
    "window": (4096, (4, 4), (64, 64), Window(1000, 0)),
    "full": (4096, (4, 4), (128, 128), Full()),
    "narrow values": (2048, (4, 2), (192, 128), Causal()),
    "wide": (2048, (4, 1), (256, 256), Causal()),
    "documents": (4096, (8, 2), (128, 128), Documents((700, 33, 2300, 1, 500, 562))),
    "documents, full": (2048, (4, 4), (64, 64), Documents((1500, 148, 400), causal=False)),
}


def make(name: str) -> tuple[list[torch.Tensor], Mask]:
    """q, k, v and dO: the same in every process."""
    rows, (q_heads, kv_heads), (dim, v_dim), mask = CASES[name]
    source = torch.Generator().manual_seed(0)
    shapes = [(q_heads, dim), (kv_heads, dim), (kv_heads, v_dim), (q_heads, v_dim)]
    return [torch.randn(1, rows, *shape, generator=source).bfloat16().cuda() for shape in shapes], mask


def worker(rank: int) -> dict[str, list[str]]:
    return {name: differences(name) for name in CASES}


def differences(name: str) -> list[str]:
    """Which tensors of this rank are not those of the whole call."""
    tensors, mask = make(name)
    whole = [x.requires_grad_() for x in tensors[:3]]
    expected = flash_attn_func(*whole, mask=mask, return_lse=True)
    gradients = torch.autograd.grad(expected[0], whole, tensors[3])
    group = dist.group.WORLD
    mine = [shard(x.detach(), group, dim=1).contiguous().requires_grad_() for x in whole]
    out, lse = context_parallel_attention(*mine, group, mask=mask, return_lse=True)
    found = torch.autograd.grad(out, mine, shard(tensors[3], group, dim=1).contiguous())
    pairs: dict[str, Any] = {"out": (shard(expected[0], group, dim=1), out), "lse": (shard(expected[1], group, dim=2), lse)}
    for one, a, b in zip(("dq", "dk", "dv"), gradients, found, strict=True):
        pairs[one] = shard(a, group, dim=1), b
    return [one for one, (a, b) in pairs.items() if not torch.equal(a, b)]


@pytest.mark.parametrize("count", [2, 4])
def test_bits_of_one_process(count: int) -> None:
    found = run_processes(worker, count, limit=200)
    assert found == [{key: [] for key in CASES}] * count
