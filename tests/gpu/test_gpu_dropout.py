"""Dropout on a GPU: the pairs that the CPU drops, whatever the batch, packing, schedule and offset; graphs; nothing read on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dash_attn import Causal, Full, Mask, Window, flash_attn_func, flash_attn_varlen_func
from dash_attn.errors import Unsupported
from dense import Results, assert_same_bits, largest_error, run_ours, same_bits
from gpu_helpers import DEVICE, REPEATS, gpu_inputs, poisoned_memory, ragged_map
from graphs import capture
from inputs import make_inputs
from modified_runs import assert_modified, expected_pairs, pairs_of_the_backward, pairs_of_the_forward
from packed_batches import make_parts, run_packed

pytestmark = pytest.mark.gpu

RATE = 0.3
SEEDS = torch.tensor([-3, 2**62 + 1])
DIMS = [(64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128)]
MASKS: list[Mask] = [Full(), Causal(), Window(150, 20)]


def dropped(inputs: tuple[Tensor, ...], mask: Mask, seeds: Tensor = SEEDS, **options: Any) -> Results:
    return run_ours(inputs, mask, dropout_p=RATE, dropout_seed=seeds.to(DEVICE), **options)


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_pairs_are_those_of_the_definition(passes: str, dim: int) -> None:
    """Every pair of two sequences and three heads of a shard, in both passes. The control: another seed, another head."""
    q, k = (torch.zeros(2, length, 3, dim, device=DEVICE, dtype=torch.bfloat16) for length in (330, 400))
    read = pairs_of_the_forward if passes == "forward" else pairs_of_the_backward
    found = read(q, k, dropout_p=RATE, dropout_seed=SEEDS.to(DEVICE), head_offset=5)
    assert torch.equal(found, expected_pairs(SEEDS, range(5, 8), 330, 400, RATE))
    assert not torch.equal(found, expected_pairs(SEEDS + 1, range(5, 8), 330, 400, RATE))
    assert not torch.equal(found, expected_pairs(SEEDS, range(3), 330, 400, RATE))
    assert abs(found.double().mean() - (1 - RATE)) < 5e-3


@pytest.mark.parametrize("schedule", ["ascending", "shift_blocks", "weave"])
def test_schedules_drop_the_same_pairs(schedule: str) -> None:
    q, k = (torch.zeros(2, 400, 2, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    found = pairs_of_the_backward(q, k, dropout_p=RATE, dropout_seed=SEEDS.to(DEVICE), schedule=schedule)
    assert torch.equal(found, expected_pairs(SEEDS, range(2), 400, 400, RATE))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_results_are_those_of_the_definition(dims: tuple[int, int], mask: Mask, dtype: torch.dtype) -> None:
    inputs = make_inputs(DEVICE, (300, 340), (4, 2), dims, dtype, batch=2)
    kept = expected_pairs(SEEDS, range(4), 300, 340, RATE).to(DEVICE)
    with poisoned_memory():
        ours = dropped(inputs, mask)
    assert_modified(ours, inputs, mask, kept=kept, dropout_p=RATE)
    plain = run_ours(inputs, mask)
    assert same_bits(plain.lse, ours.lse), "the LSE is that without dropout"
    assert largest_error(plain.out, ours.out) > 0.1, "the control: dropout does something"


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_long_rows(dim: int) -> None:
    """Many tiles, and parts of a group."""
    inputs = make_inputs(DEVICE, (1300, 1500), (4, 1), (dim, 0))
    kept = expected_pairs(SEEDS[:1], range(4), 1300, 1500, RATE).to(DEVICE)
    assert_modified(dropped(inputs, Causal(), SEEDS[:1]), inputs, Causal(), kept=kept, dropout_p=RATE)


@pytest.mark.parametrize("dim", [64, 128])
def test_block_masks_softcap_and_sinks(dim: int) -> None:
    mask = ragged_map(330, 390)
    inputs = gpu_inputs(330, 390, dim=dim, batch=2)
    kept = expected_pairs(SEEDS, range(4), 330, 390, RATE).to(DEVICE)
    more: dict[str, Any] = {"softcap": 5.0, "sinks": torch.linspace(-1, 2, 4, device=DEVICE)}
    assert_modified(dropped(inputs, mask, **more), inputs, mask, kept=kept, dropout_p=RATE, **more)


def test_the_cpu_backend_computes_the_same() -> None:
    inputs = gpu_inputs(300, 340, dim=64, batch=2)
    on_cpu = run_ours(tuple(x.cpu() for x in inputs), Causal(), dropout_p=RATE, dropout_seed=SEEDS)
    found = dropped(inputs, Causal())
    for mine, theirs in zip(found, on_cpu, strict=True):
        assert largest_error(mine.cpu(), theirs) < 0.05
    other = dropped(inputs, Causal(), SEEDS + 1)
    assert largest_error(other.out.cpu(), on_cpu.out) > 0.3, "the control: another seed"


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("mask", MASKS[:2], ids=str)
def test_repeats_have_the_same_bits(mask: Mask, dim: int) -> None:
    inputs = gpu_inputs(1500, 1500, (8, 2), dim, batch=2)
    first = dropped(inputs, mask)
    for repeat in range(min(REPEATS, 50)):
        assert_same_bits(dropped(inputs, mask), first, f"repeat {repeat}")
    assert not same_bits(dropped(inputs, mask, SEEDS + 1).dq, first.dq), "the control: another seed"


@pytest.mark.parametrize("dim", [64, 128, 192])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_bits_do_not_depend_on_batch_or_packing(mask: Mask, dim: int) -> None:
    lengths = ((500, 500), (300, 340), (1, 700), (1200, 1200))
    seeds = torch.tensor([5, -9, 2**40, 77], device=DEVICE)
    parts = make_parts("cuda", lengths, (4, 2), dim)
    packed = run_packed(parts, mask, dropout_p=RATE, dropout_seed=seeds)
    for i, part in enumerate(parts):
        alone = dropped(part, mask, seeds[i : i + 1])
        assert_same_bits(packed[i], alone, f"sequence {i}")
        assert not same_bits(dropped(part, mask, seeds[i : i + 1] + 1).out, alone.out), "the control: another seed"
    batch = tuple(torch.cat([part[i] for part in (parts[0], parts[0])]) for i in range(4))
    together = dropped(batch, mask, seeds[[3, 0]])
    assert_same_bits(Results(*(x[1:] for x in together)), dropped(parts[0], mask, seeds[:1]), "second in a batch")


def test_heads_of_a_shard_have_the_models_bits() -> None:
    inputs = gpu_inputs(600, 600, (8, 4), 64, batch=2)
    whole = dropped(inputs, Causal())
    for first in (0, 2):
        heads, keys = slice(2 * first, 2 * first + 4), slice(first, first + 2)
        part = tuple(x[:, :, own].contiguous() for x, own in zip(inputs, (heads, keys, keys, heads), strict=True))
        assert_same_bits(dropped(part, Causal(), head_offset=first), whole.of_heads(heads, keys))
    assert not same_bits(dropped(part, Causal()).out, whole.of_heads(heads, keys).out), "the control: no offset"


def test_nothing_is_read_on_the_host() -> None:
    inputs, seeds = gpu_inputs(300, 300, dim=64, batch=2), SEEDS.to(DEVICE)
    dropped(inputs, Causal(), seeds)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        dropped(inputs, Causal(), seeds)
        run_ours(inputs, Causal(), dropout_p=RATE)  # seeds are drawn
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_reads_new_seeds() -> None:
    inputs, seeds = gpu_inputs(400, 400, dim=64, batch=2), SEEDS.to(DEVICE)
    graph, found = capture(lambda: dropped(inputs, Causal(), seeds))
    for new in (SEEDS, SEEDS + 5):
        seeds.copy_(new)
        graph.replay()
        assert_same_bits(found, dropped(inputs, Causal(), new), "replayed")
    assert not same_bits(dropped(inputs, Causal()).out, found.out)


def test_compiled_calls_have_the_eager_bits() -> None:
    inputs = gpu_inputs(300, 300, dim=64, batch=2)

    def call(q: Tensor, k: Tensor, v: Tensor, seeds: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, RATE, causal=True, dropout_seed=seeds)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for seeds in (SEEDS.to(DEVICE), SEEDS.to(DEVICE) + 1):
        assert same_bits(compiled(*inputs[:3], seeds), call(*inputs[:3], seeds))


def test_drawn_seeds_follow_the_generator() -> None:
    inputs = gpu_inputs(300, 300, dim=64, batch=2)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(run_ours(inputs, Causal(), dropout_p=RATE))
    assert_same_bits(runs[0], runs[1])
    assert not same_bits(runs[0].out, runs[2].out)


def test_what_is_not_served_raises() -> None:
    q, k, v, _ = gpu_inputs(64, 64, dim=64)
    with pytest.raises(Unsupported, match=r"without softcap, dropout and ALiBi; got dropout_p=0\.3"):
        flash_attn_func(q, k, v, RATE, accumulation="unordered")
    offsets = torch.tensor([0, 64], device=DEVICE, dtype=torch.int32)
    with pytest.raises(ValueError, match="dropout_seed must be 1 numbers"):
        flash_attn_varlen_func(q[0], k[0], v[0], offsets, offsets, 64, 64, RATE, dropout_seed=SEEDS.to(DEVICE))
