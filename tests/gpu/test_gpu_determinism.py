"""The determinism contract on a GPU at full size, each promise next to a control that breaks it.

DASH_ATTN_REPEATS sets how often a run is repeated (1000 unless told otherwise).
"""

from __future__ import annotations

import pytest
import torch

from dash_attn import Causal, Documents, Full, Mask, Window
from dense import assert_same_bits, run_ours, same_bits
from gpu_helpers import DEVICE, REPEATS, full_size, gpu_inputs, poisoned_memory, served

pytestmark = pytest.mark.gpu

BOTH = [Full(), Causal()]
MOST_TRIES = 50  # of an unordered run, until it differs


@pytest.mark.parametrize("seqlen", [4096, 16384])
@pytest.mark.parametrize("mask", BOTH, ids=str)
def test_the_same_bits_every_time(mask: Mask, seqlen: int) -> None:
    inputs = full_size(seqlen)
    expected = run_ours(inputs, mask)
    for run in range(REPEATS):
        with poisoned_memory():
            result = run_ours(inputs, mask)
        assert_same_bits(result, expected, f"run {run}")


@pytest.mark.parametrize("mask", BOTH, ids=str)
def test_head_dim_64(mask: Mask) -> None:
    inputs = full_size(4096, (32, 32), 64)
    expected = run_ours(inputs, mask)
    for run in range(REPEATS // 5):
        with poisoned_memory():
            result = run_ours(inputs, mask)
        assert_same_bits(result, expected, f"run {run}")


@pytest.mark.parametrize("mask", [Full(), Causal(), Window(1024, 0), Documents((1000, 96, 3000))], ids=str)
def test_grouped_query_heads(mask: Mask) -> None:
    inputs = full_size(4096, (32, 8))
    expected = run_ours(inputs, mask)
    for run in range(REPEATS // 5):
        assert_same_bits(run_ours(inputs, mask), expected, f"run {run}")


@pytest.mark.parametrize(("schedule", "mask"), served(), ids=str)
def test_every_schedule(schedule: str, mask: Mask) -> None:
    inputs = full_size(4096)
    expected = run_ours(inputs, mask, schedule=schedule)
    for run in range(REPEATS // 50):
        assert_same_bits(run_ours(inputs, mask, schedule=schedule), expected, f"{schedule}, run {run}")


def test_memory_is_poisoned() -> None:
    """The control of the tests above: memory that nobody stores to would show, in outputs and in workspaces."""
    like = torch.ones(2, device=DEVICE)
    with poisoned_memory():
        assert torch.empty(3, device=DEVICE).isnan().all()
        assert like.new_empty(3, dtype=torch.bfloat16).isnan().all()
        assert torch.empty(8, dtype=torch.uint8, device=DEVICE).view(torch.float32).isnan().all()


@pytest.mark.parametrize("seqlen", [4096, 16384])
@pytest.mark.parametrize("mask", BOTH, ids=str)
def test_unordered_differs(mask: Mask, seqlen: int) -> None:
    """The control: without an order dQ changes from run to run, and nothing else does."""
    inputs = full_size(seqlen)
    first = run_ours(inputs, mask, accumulation="unordered")
    differed = False
    for _ in range(MOST_TRIES):
        again = run_ours(inputs, mask, accumulation="unordered")
        assert_same_bits(again._replace(dq=first.dq), first, "unordered")
        differed |= not same_bits(again.dq, first.dq)
    assert differed


def test_the_order_decides_the_bits() -> None:
    inputs = full_size(4096)
    results = [run_ours(inputs, Causal(), schedule=name) for name in ("ascending", "descending", "spt")]
    assert not same_bits(results[0].dk, results[1].dk)
    assert not same_bits(results[0].dq, results[2].dq)
    assert same_bits(results[0].out, results[1].out), "the schedule is the backward's alone"


@pytest.mark.parametrize("mask", BOTH, ids=str)
def test_a_busy_gpu_does_not_reach_the_bits(mask: Mask) -> None:
    """Matrix products on one stream and our own kernels on two, all at once."""
    ours, others = full_size(4096), gpu_inputs(2000, 2000, (8, 4), batch=4, seed=1)
    expected, expected_others = run_ours(ours, mask), run_ours(others, mask)
    a = torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16)
    product = torch.empty_like(a)
    noise, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for run in range(max(1, REPEATS // 5)):
        with torch.cuda.stream(noise):
            for _ in range(1 + run % 8):
                torch.mm(a, a, out=product)
        with torch.cuda.stream(second):
            beside = run_ours(others, mask)
        with poisoned_memory():
            result = run_ours(ours, mask)
        torch.cuda.current_stream().wait_stream(second)
        assert_same_bits(result, expected, f"run {run}")
        assert_same_bits(beside, expected_others, f"second stream, run {run}")
