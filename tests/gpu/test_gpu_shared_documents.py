"""Documents in a row that ranks share, played by one process on one GPU: each has the bits that it has alone, and in a packed call."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from dash_attn import Causal, Full, Mask, Window, flash_attn_func, flash_attn_varlen_func
from dash_attn.call.options import Choices, options_for
from dash_attn.distributed.context.loopback import Results, play_all_ranks
from dash_attn.distributed.context.shared_call import SharedCall
from dash_attn.scheduling.ranks.sharding import Sharding
from gpu_helpers import DEVICE, poisoned_memory
from inputs import make_inputs

pytestmark = pytest.mark.gpu

DIMS = [(64, 64), (128, 128), (96, 96), (192, 128), (192, 192), (256, 256), (59, 40)]
MASKS = [Causal(), Full(), Window(300, 0), Window(300, 200)]
LENGTHS = (700, 33, 2300, 1, 500, 128, 434)  # 4096
SHORT = (23, 170, 5, 58) * 8  # 2048
dims = pytest.mark.parametrize("dims", DIMS, ids=str)
masks = pytest.mark.parametrize("mask", MASKS, ids=str)


def packed(tensors: list[Tensor], lengths: tuple[int, ...], mask: Mask, sinks: Tensor | None, dlse: Tensor) -> Results:
    q, k, v, dout = tensors
    batch, rows, heads, _ = q.shape
    ends = torch.tensor([0, *accumulate(lengths * batch)], dtype=torch.int32, device=DEVICE)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)] + ([] if sinks is None else [sinks.clone().requires_grad_()])
    flat = [x.flatten(0, 1) for x in leaves[:3]]
    given = leaves[3] if sinks is not None else None
    out, lse = flash_attn_varlen_func(*flat, ends, ends, max(lengths), max(lengths), mask=mask, sinks=given, return_lse=True)
    out, lse = out.unflatten(0, (batch, rows)), lse.view(heads, batch, rows).transpose(0, 1)
    gradients = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    return Results(out.detach(), lse.detach(), *gradients)


def check(
    mask: Mask,
    lengths: tuple[int, ...],
    sharding: Sharding,
    heads: tuple[int, int],
    dims: tuple[int, int],
    batch: int = 1,
    sinks: bool = False,
) -> None:
    rows = sharding.rows
    q, k, v, dout = make_inputs(DEVICE, (rows, rows), heads, dims, torch.bfloat16, batch)
    dlse = torch.randn(batch, heads[0], rows, device=DEVICE)
    logits = torch.randn(heads[0], device=DEVICE) if sinks else None
    expected = packed([q, k, v, dout], lengths, mask, logits, dlse)
    row = SharedCall.of((q, k, v), options_for(Choices(mask=mask), dims[0]), sharding, lengths)
    with poisoned_memory():
        found = play_all_ranks(row, q, k, v, dout, sinks=logits, dlse=dlse)
    for name, one, other in zip(Results._fields, found, expected, strict=True):
        assert (one is None and other is None) or torch.equal(one, other), name


@dims
@masks
def test_bits_of_packed_sequences(mask: Mask, dims: tuple[int, int]) -> None:
    for sharding in (Sharding.zigzag(4096, 4), Sharding.contiguous(4096, 4)):
        check(mask, LENGTHS, sharding, (4, 2), dims, sinks=True)


@pytest.mark.parametrize("devices", [1, 2, 8, 16])
@pytest.mark.parametrize("mask", [Causal(), Full()], ids=str)
def test_any_number_of_ranks(mask: Mask, devices: int) -> None:
    check(mask, LENGTHS, Sharding.zigzag(4096, devices), (8, 2), (128, 128))
    check(mask, SHORT, Sharding.zigzag(2048, devices), (4, 4), (64, 64), batch=2, sinks=True)


@pytest.mark.parametrize("mask", [Causal(), Full(), Window(300, 0)], ids=str)
def test_bits_of_each_document_alone(mask: Mask) -> None:
    q, k, v, dout = make_inputs(DEVICE, (4096, 4096), (4, 2), (128, 128), torch.bfloat16, 1)
    row = SharedCall.of((q, k, v), options_for(Choices(mask=mask), 128), Sharding.zigzag(4096, 4), LENGTHS)
    found, first = play_all_ranks(row, q, k, v, dout), 0
    for length in LENGTHS:
        mine = slice(first, first + length)
        leaves = [x[:, mine].detach().clone().requires_grad_() for x in (q, k, v)]
        out, lse = flash_attn_func(*leaves, mask=mask, return_lse=True)
        gradients = torch.autograd.grad(out, leaves, dout[:, mine])
        assert torch.equal(found.lse[:, :, mine], lse)
        for one, other in zip((found.out, found.dq, found.dk, found.dv), (out, *gradients), strict=True):
            assert torch.equal(one[:, mine], other)
        first += length


def test_the_same_in_every_run() -> None:
    q, k, v, dout = make_inputs(DEVICE, (4096, 4096), (4, 2), (128, 128), torch.bfloat16, 1)
    row = SharedCall.of((q, k, v), options_for(Choices(mask=Causal()), 128), Sharding.zigzag(4096, 4), LENGTHS)
    expected = play_all_ranks(row, q, k, v, dout)
    for _ in range(20):
        found = play_all_ranks(row, q, k, v, dout)
        assert all(torch.equal(a, b) for a, b in zip(found[:5], expected[:5], strict=True))
