"""Two processes inside PyTorch's own context_parallel that share one GPU, over gloo: our bits are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional

from dash_attn.integrations import sdpa
from processes import run_processes

pytestmark = pytest.mark.gpu
DEVICE, DTYPE = "cuda", torch.bfloat16
SHAPES = ((8, 128),) * 4  # heads and head dim of q, k, v and the gradient
ROWS = 4096


def worker(rank: int) -> dict[str, Any]:
    mesh = DeviceMesh.from_group(dist.group.WORLD, DEVICE)
    source = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, heads, ROWS, dim, generator=source).to(DEVICE, DTYPE) for heads, dim in SHAPES]
    by_pytorch = step(tensors)
    with sdpa.enable(context_parallel="torch"):
        return {"ours": differences(mesh, tensors, step(tensors)), "pytorch": differences(mesh, tensors, by_pytorch)}


def attend(*qkv: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(*qkv, is_causal=True)


def step(tensors: list[Tensor]) -> list[Tensor]:
    """out, dQ, dK and dV."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors[:3]]
    out = attend(*leaves)
    return [x.contiguous() for x in (out.detach(), *torch.autograd.grad(out, leaves, tensors[3]))]


def differences(mesh: DeviceMesh, tensors: list[Tensor], whole: list[Tensor]) -> list[str]:
    """Which tensors of this rank are not its part of `whole`."""
    buffers = [x.clone() for x in (*tensors, *whole)]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 8):
        found = step(buffers[:4])
        return [name for name, a, b in zip(("out", "dq", "dk", "dv"), buffers[4:], found, strict=True) if not torch.equal(a, b)]


def test_bits_of_one_process() -> None:
    found = run_processes(worker, 2, limit=120)
    assert [one["ours"] for one in found] == [[], []]
    # The control: one process by another kernel. (PyTorch's own ring would crash here: over gloo it takes no tensors of a GPU.)
    assert all(one["pytorch"] == ["out", "dq", "dk", "dv"] for one in found)
