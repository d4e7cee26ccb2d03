"""Two processes inside PyTorch's own context_parallel that share one GPU, over gloo: our bits are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional

from dash_attn.integrations.sdpa import replace_sdpa
from processes import run_processes, said

pytestmark = pytest.mark.gpu
DEVICE, DTYPE = "cuda", torch.bfloat16
SHAPES = ((8, 128), (8, 128), (8, 128), (8, 128))  # as many KV heads as query heads: PyTorch's ring takes no groups
ROWS = 4096


def worker(rank: int) -> dict[str, Any]:
    mesh = DeviceMesh.from_group(dist.group.WORLD, DEVICE)
    with replace_sdpa(context_parallel="torch"):
        ours = differences(mesh, attend)
    return {"ours": ours, "ring": said(lambda: differences(mesh, attend))}


def attend(*qkv: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(*qkv, is_causal=True)


def step(tensors: list[Tensor], call: Callable[..., Tensor]) -> list[Tensor]:
    """out, dQ, dK and dV."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors[:3]]
    out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]


def differences(mesh: DeviceMesh, call: Callable[..., Tensor]) -> list[str]:
    """Which tensors of this rank are not those of the whole call by the same function."""
    source = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, heads, ROWS, dim, generator=source).to(DEVICE, DTYPE) for heads, dim in SHAPES]
    whole = [x.contiguous() for x in step(tensors, call)]
    with context_parallel(mesh, buffers=[*tensors, *whole], buffer_seq_dims=[2] * 8):
        found = step(tensors, call)
        return [name for name, a, b in zip(("out", "dq", "dk", "dv"), whole, found, strict=True) if not torch.equal(a, b)]


def test_bits_of_one_process(tmp_path: Path) -> None:
    found = run_processes(worker, 2, tmp_path, limit=120)
    assert [one["ours"] for one in found] == [[], []]
    assert any(one["ring"] != "no error: []" for one in found)  # PyTorch's own ring differs, or cannot run over gloo
    print("PyTorch's own ring:", [one["ring"] for one in found])
