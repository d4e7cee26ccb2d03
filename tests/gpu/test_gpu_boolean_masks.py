"""Boolean masks on a GPU: maps of blocks run, with the bits of a TileMap; what has no kernel yet raises by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dash_attn import BooleanMask, TileMap, flash_attn_func
from dash_attn.integrations.sdpa import replace_sdpa
from dense import largest_error
from gpu_helpers import DEVICE

pytestmark = pytest.mark.gpu

Q_LEN, KV_LEN = 1000, 1300  # neither fills its last block
BLOCKS = torch.rand(16, 21, generator=torch.Generator().manual_seed(0)) < 0.5


def elements() -> Tensor:
    return BLOCKS.repeat_interleave(64, 0).repeat_interleave(64, 1)[:Q_LEN, :KV_LEN].contiguous()


def inputs(dim: int = 128) -> list[Tensor]:
    made = torch.Generator(DEVICE).manual_seed(0)
    shapes = ((Q_LEN, 4), (KV_LEN, 2), (KV_LEN, 2), (Q_LEN, 4))
    return [torch.randn(2, *shape, dim, generator=made, device=DEVICE, dtype=torch.bfloat16) for shape in shapes]


def step(tensors: list[Tensor], mask: Any) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out = flash_attn_func(*leaves, mask=mask)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_matrix_of_whole_blocks_has_the_bits_of_a_tile_map(dim: int) -> None:
    tensors = inputs(dim)
    expected = step(tensors, TileMap(BLOCKS.numpy(), 64, 64))
    for mask in (elements().to(DEVICE), elements().to(DEVICE).expand(2, 4, Q_LEN, KV_LEN), BooleanMask(elements())):
        assert all(map(torch.equal, step(tensors, mask), expected))


def test_sdpa_takes_it() -> None:
    tensors, mask = [x.transpose(1, 2) for x in inputs()[:3]], elements().to(DEVICE)
    attends = mask.any(1)
    truth = functional.scaled_dot_product_attention(*(x.float() for x in tensors), attn_mask=mask, enable_gqa=True)
    with replace_sdpa():
        ours = functional.scaled_dot_product_attention(*tensors, attn_mask=mask, enable_gqa=True)
    assert largest_error(ours[:, :, attends], truth[:, :, attends]) < 0.02
    assert not ours[:, :, ~attends].any()


def test_other_matrices_raise() -> None:
    tensors, mask = inputs(), elements().to(DEVICE)
    holes = mask.clone()
    holes[3, 5] ^= True
    with pytest.raises(ValueError, match="'hopper' has no boolean masks with partial blocks yet"):
        step(tensors, holes)
    with pytest.raises(ValueError, match="'hopper' has no boolean masks per sequence or head yet"):
        step(tensors, torch.stack([mask, ~mask])[:, None])
    with pytest.raises(ValueError, match=r"a mask tensor must be on the device of q, k and v \(cuda:0\); got cpu"):
        step(tensors, mask.cpu())


def test_a_graph_takes_a_mask_that_was_made_before() -> None:
    tensors, mask = inputs(), elements().to(DEVICE)
    made = BooleanMask(mask)
    expected = step(tensors, made)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(tensors, made)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, captured, expected))
    with pytest.raises(RuntimeError, match="make a BooleanMask of it before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        flash_attn_func(*tensors[:3], mask=mask)
