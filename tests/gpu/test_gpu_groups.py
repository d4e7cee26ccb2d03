"""Groups of query heads in parts on a GPU: dK and dV are right, the same in every run, and depend on nothing around them.

Parts come of long groups: 4096 rows of queries, over all query heads of a part, are the most that a chain of several heads walks.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dash_attn import Causal, Full, Mask, Window, explain, flash_attn_func
from dash_attn.call.call import Call, Grads
from dash_attn.call.options import AttentionOptions
from dash_attn.scheduling.problem import parts_of
from dense import Results, assert_same_bits, run_dense, run_ours, same_bits
from gpu_helpers import (
    DEVICE,
    REPEATS,
    Inputs,
    assert_accurate,
    assert_batch_changes_no_bit,
    gpu_inputs,
    hopper,
    poisoned_memory,
    run_script,
)
from inputs import make_inputs
from packed_batches import run_packed

pytestmark = pytest.mark.gpu

BOTH = [Full(), Causal()]
RANKS = [(8, 1), (7, 1), (71, 1)]  # query heads and KV heads of a tensor-parallel rank
DIMS = [64, 128, 256]
MOST_TRIES = 50  # of an unordered run, until it differs
ranks, dims, masks = (
    pytest.mark.parametrize("heads", RANKS, ids=str),
    pytest.mark.parametrize("dim", DIMS),
    pytest.mark.parametrize("mask", BOTH, ids=str),
)


@pytest.mark.parametrize(
    ("length", "heads", "parts"),
    [(300, (71, 1), 6), (300, (26, 2), 1), (700, (8, 1), 2), (700, (14, 2), 2), (1500, (5, 1), 3), (2100, (3, 1), 3)],
)
@pytest.mark.parametrize("mask", [*BOTH, Window(200, 50)], ids=str)
@pytest.mark.parametrize("dim", [*DIMS, 192, 96, 111])
def test_against_fp64(dim: int, mask: Mask, length: int, heads: tuple[int, int], parts: int) -> None:
    assert parts_of(heads[0] // heads[1], length) == parts
    assert_accurate(gpu_inputs(length, length, heads, dim, batch=2 if length < 1000 else 1), mask)


@pytest.mark.parametrize("lengths", [(600, 130), (2100, 300), (300, 2500)], ids=str)
@dims
def test_unequal_lengths(dim: int, lengths: tuple[int, int]) -> None:
    """Queries decide the parts. Some keys are attended by nobody; their chains add zeros."""
    for mask in (*BOTH, Window(60, 20)):
        assert_accurate(gpu_inputs(*lengths, (16, 1), dim), mask)


EMPTY_CHAINS = """
import sys
from dash_attn import Window
from dense import assert_same_bits, run_ours
from gpu_helpers import DEVICE, REPEATS, hopper
from inputs import make_inputs

hopper("calls.backward_setup").MOST_POLLS = 1_000_000
inputs = make_inputs(DEVICE, (300, 2500), (26, 1), tuple(map(int, sys.argv[1:])), batch=3)
expected = run_ours(inputs, Window(60, 20))
assert not expected.dk[:, :2140].any() and not expected.dv[:, :2140].any()
for run in range(max(100, REPEATS)):
    assert_same_bits(run_ours(inputs, Window(60, 20)), expected, f"run {run}")
print("finished")
"""


@pytest.mark.parametrize("dims_of", [(64, 64), (128, 128), (192, 128), (192, 192), (256, 256)], ids=str)
def test_chains_without_steps(dims_of: tuple[int, int]) -> None:
    """Most keys are attended by nobody. Their chains only add zeros, and are the first of their CTA: no load holds anyone up, so that
    every role must wait for what the planner has yet to write. In a process of its own, because a fault here loses the CUDA context."""
    done = run_script(EMPTY_CHAINS, *map(str, dims_of))
    assert (done.returncode, done.stdout) == (0, "finished\n"), done.stderr


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_of_another_head_dim(dtype: torch.dtype) -> None:
    for dims_of in ((192, 128), (64, 40), (72, 128)):
        assert_accurate(make_inputs(DEVICE, (700, 700), (8, 1), dims_of, dtype), Causal())


def head_by_head(inputs: Inputs, mask: Mask) -> Results:
    """Dense attention in float32, one query head at a time; dK and dV summed in float64."""
    q, k, v, dout = inputs
    group = q.shape[2] // k.shape[2]
    single = []
    for head in range(q.shape[2]):
        kv_head = slice(head // group, head // group + 1)
        with DEVICE:
            single.append(
                run_dense((q[:, :, head : head + 1], k[:, :, kv_head], v[:, :, kv_head], dout[:, :, head : head + 1]), mask, torch.float32)
            )
    out, lse, dq = (torch.cat([getattr(one, name) for one in single], 1 if name == "lse" else 2) for name in ("out", "lse", "dq"))
    dk, dv = (
        torch.stack(
            [torch.cat([getattr(one, name) for one in single[h * group : (h + 1) * group]], 2).double().sum(2) for h in range(k.shape[2])],
            2,
        )
        for name in ("dk", "dv")
    )
    return Results(out, lse, dq, dk, dv)


def relative_error(actual: Tensor, truth: Tensor) -> float:
    assert not actual.isnan().any()
    return float((actual.double() - truth.double()).norm() / truth.double().norm())


@dims
@masks
@ranks
def test_full_size_against_fp32(heads: tuple[int, int], mask: Mask, dim: int) -> None:
    length = 4096 if heads[0] < 71 else 2049
    assert parts_of(heads[0], length) == heads[0]
    inputs = gpu_inputs(length, length, heads, dim)
    ours, truth = run_ours(inputs, mask), head_by_head(inputs, mask)
    for name, a, b in zip(Results._fields, ours, truth, strict=True):
        assert relative_error(a, b) < (1e-4 if name == "lse" else 1e-2), name
    without_last = head_by_head((inputs[0][:, :, :-1], *inputs[1:3], inputs[3][:, :, :-1]), mask)
    assert relative_error(ours.dk, without_last.dk) > 3e-2, "the control: a query head less"


@dims
@masks
@ranks
def test_the_same_bits_every_time_at_full_size(heads: tuple[int, int], mask: Mask, dim: int) -> None:
    inputs = gpu_inputs(8192 if heads[0] < 71 else 2300, 8192 if heads[0] < 71 else 2300, heads, dim, batch=2)
    expected = run_ours(inputs, mask)
    for run in range(max(20, REPEATS // 50)):
        with poisoned_memory():
            result = run_ours(inputs, mask)
        assert_same_bits(result, expected, f"run {run}")


@masks
@pytest.mark.parametrize("dim", [128, 192])
def test_the_same_bits_every_time_beside_other_work(dim: int, mask: Mask) -> None:
    inputs = gpu_inputs(4096, 4096, (16, 2), dim)
    expected = run_ours(inputs, mask)
    a = torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16)
    product, noise = torch.empty_like(a), torch.cuda.Stream()
    torch.cuda.synchronize()
    for run in range(max(20, REPEATS // 50)):
        with torch.cuda.stream(noise):
            for _ in range(1 + run % 8):
                torch.mm(a, a, out=product)
        assert_same_bits(run_ours(inputs, mask), expected, f"run {run}")


@pytest.mark.parametrize("schedule", ["ascending", "spt", "alternating", "weave"])
def test_every_kind_of_schedule(schedule: str) -> None:
    """Orders of one kind have one sum, those of two have two."""
    inputs = gpu_inputs(2100, 2100, (7, 1))
    ours = assert_accurate(inputs, Causal(), schedule=schedule)
    for run in range(max(5, REPEATS // 200)):
        assert_same_bits(run_ours(inputs, Causal(), schedule=schedule), ours, f"run {run}")


@dims
@masks
@ranks
def test_batch_and_position(heads: tuple[int, int], mask: Mask, dim: int) -> None:
    assert_batch_changes_no_bit(gpu_inputs(2100, 2100, heads, dim, batch=3), mask)


@dims
@pytest.mark.parametrize("mask", [*BOTH, Window(300, 0)], ids=str)
@ranks
def test_packed_with_others(heads: tuple[int, int], mask: Mask, dim: int) -> None:
    """Each sequence has as many parts as alone: beside it are shorter ones, with fewer, and longer ones."""
    lengths = (2300, 40, 900, 1, 2049, 129)
    parts = [make_inputs(DEVICE, (n, n), heads, (dim, 0), seed=i) for i, n in enumerate(lengths)]
    assert len({parts_of(heads[0], n) for n in lengths}) > 1
    alone = [run_ours(part, mask) for part in parts]
    for room in (0, 1000):
        for place, (packed, expected) in enumerate(zip(run_packed(parts, mask, room), alone, strict=True)):
            assert_same_bits(packed, expected, f"sequence {place}, {room} to spare")
    turned = run_packed(parts[::-1], mask)[::-1]
    for place, (packed, expected) in enumerate(zip(turned, alone, strict=True)):
        assert_same_bits(packed, expected, f"sequence {place} in reverse")


@pytest.mark.parametrize("dim", [128, 256])
def test_packed_with_sequences_without_queries_or_keys(dim: int) -> None:
    """A KV tile without queries has chains that add zeros."""
    lengths = ((0, 300), (2100, 2100), (700, 0), (0, 0), (900, 1500))
    parts = [make_inputs(DEVICE, pair, (8, 1), (dim, 0), seed=i) for i, pair in enumerate(lengths)]
    with poisoned_memory():
        packed = run_packed(parts, Causal())
    assert packed[0].dk.abs().max() == packed[0].dv.abs().max() == 0
    for place in (1, 4):
        assert_same_bits(packed[place], run_ours(parts[place], Causal()), f"sequence {place}")


def test_the_offset_matters() -> None:
    """The control: with three parts, KV heads of odd number begin with the other kind."""
    inputs = gpu_inputs(2100, 2100, (3, 1))
    even, odd = (run_ours(inputs, Causal(), head_offset=offset) for offset in (0, 1))
    assert not same_bits(even.dk, odd.dk)


def test_the_order_of_the_parts_matters() -> None:
    """The control: the same query heads in another order."""
    q, k, v, dout = gpu_inputs(2100, 2100, (7, 1), dtype=torch.float16)
    there, back = run_ours((q, k, v, dout), Causal()), run_ours((q.roll(1, 2), k, v, dout.roll(1, 2)), Causal())
    assert relative_error(back.dk, there.dk) < 1e-3
    assert not same_bits(back.dk, there.dk)


@dims
@masks
def test_unordered_is_close_and_differs(mask: Mask, dim: int) -> None:
    """The control of the repeats above: without turns dQ, or dK and dV, change from run to run."""
    inputs = gpu_inputs(4096, 4096, (8, 1), dim)
    ordered, first = run_ours(inputs, mask), run_ours(inputs, mask, accumulation="unordered")
    differed = False
    for _ in range(MOST_TRIES):
        again = run_ours(inputs, mask, accumulation="unordered")
        for name, a, b in zip(Results._fields, again, ordered, strict=True):
            assert relative_error(a, b) < 3e-3, name
        differed |= not all(same_bits(a, b) for a, b in zip(again, first, strict=True))
    assert differed


def test_packed_unordered_is_close() -> None:
    parts = [make_inputs(DEVICE, (n, n), (8, 1), (128, 0), seed=n) for n in (2300, 40, 900)]
    with poisoned_memory(warn_only=True), pytest.warns(UserWarning, match="unordered"):
        packed = run_packed(parts, Causal(), accumulation="unordered")
    for part, found in zip(parts, packed, strict=True):
        for name, a, b in zip(Results._fields, found, run_ours(part, Causal()), strict=True):
            assert relative_error(a, b) < 3e-3, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [*DIMS, 192])
def test_parts_are_rounded_once(dim: int, dtype: torch.dtype) -> None:
    """dV of one key is the sum of dO. The first query head has 257 (2049 in float16), which 16 bits do not hold, the second all but 1 of
    it with the other sign."""
    large = 256.0 if dtype == torch.bfloat16 else 2048.0
    assert torch.tensor(large + 1, dtype=dtype) == large
    q, k, v, dout = (
        torch.zeros(1, length, heads, dim, dtype=dtype, device=DEVICE) for length, heads in ((2100, 2), (1, 1), (1, 1), (2100, 2))
    )
    dout[0, 0, 0], dout[0, 1, 0], dout[0, 0, 1] = large, 1, -large
    assert parts_of(2, 2100) == 2
    assert run_ours((q, k, v, dout), Full()).dv.unique().tolist() == [1]


@pytest.mark.parametrize("heads", [(8, 1), (71, 1), (64, 8)], ids=str)
def test_memory_of_a_backward(heads: tuple[int, int]) -> None:
    """Gradients and what `explain` says: nothing is copied for a part."""
    q, k, v, dout = gpu_inputs(8192, 8192, heads)
    options = AttentionOptions(Causal(), 128**-0.5)
    call, backward = Call(q, k, v, options), hopper("calls.backward").backward
    saved = hopper("calls.forward").forward(call)
    backward(call, saved, Grads(dout))  # tables and kernels
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients = backward(call, saved, Grads(dout))
    torch.cuda.synchronize()
    workspace = explain(flash_attn_func, q, k, v, mask=Causal()).workspace_bytes
    assert workspace is not None
    expected = workspace + sum(2 * x.numel() for x in gradients[:3])
    assert torch.cuda.max_memory_allocated() - before <= expected + 4 * 2**20
