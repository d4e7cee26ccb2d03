"""ALiBi on a GPU: the biases of the definition, whatever the batch and packing; slopes that change in a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dash_attn import Causal, Documents, Full, Mask, Window, flash_attn_func
from dash_attn.errors import Unsupported
from dense import Results, assert_same_bits, largest_error, run_ours, same_bits
from gpu_helpers import DEVICE, REPEATS, gpu_inputs, poisoned_memory, ragged_map
from graphs import capture
from inputs import make_inputs
from modified_runs import assert_modified, expected_pairs
from packed_batches import make_parts, run_packed

pytestmark = pytest.mark.gpu

BY_HEAD = torch.tensor([0.5, 0.25, 0.1, 0.0])
BY_SEQUENCE = torch.stack([BY_HEAD, BY_HEAD.flip(0) + 0.3])
DIMS = [(64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128)]
MASKS: list[Mask] = [Full(), Causal(), Window(150, 20)]


def biased(inputs: tuple[Tensor, ...], mask: Mask, slopes: Tensor = BY_HEAD, **options: Any) -> Results:
    return run_ours(inputs, mask, alibi_slopes=slopes.to(DEVICE), **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_results_are_those_of_the_definition(dims: tuple[int, int], mask: Mask, dtype: torch.dtype) -> None:
    """The last query is at the last key."""
    inputs = make_inputs(DEVICE, (300, 340), (4, 2), dims, dtype, batch=2)
    for slopes in (BY_HEAD, BY_SEQUENCE):
        with poisoned_memory():
            ours = biased(inputs, mask, slopes)
        assert_modified(ours, inputs, mask, slopes=slopes.to(DEVICE))
    assert largest_error(run_ours(inputs, mask).out, ours.out) > 0.1, "the control: slopes do something"


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("mask", [Causal(), Full()], ids=str)
def test_with_dropout_or_softcap(mask: Mask, dims: tuple[int, int]) -> None:
    inputs, seeds = make_inputs(DEVICE, (300, 340), (4, 2), dims, batch=2), torch.tensor([4, -4], device=DEVICE)
    kept = expected_pairs(seeds.cpu(), range(4), 300, 340, 0.2).to(DEVICE)
    ours = biased(inputs, mask, BY_SEQUENCE, dropout_p=0.2, dropout_seed=seeds)
    assert_modified(ours, inputs, mask, slopes=BY_SEQUENCE.to(DEVICE), kept=kept, dropout_p=0.2)
    capped = biased(inputs, mask, BY_SEQUENCE, softcap=5.0)
    assert_modified(capped, inputs, mask, slopes=BY_SEQUENCE.to(DEVICE), softcap=5.0)


@pytest.mark.parametrize("dim", [64, 128])
def test_block_masks_softcap_and_sinks(dim: int) -> None:
    mask, inputs = ragged_map(330, 390), gpu_inputs(330, 390, dim=dim, batch=2)
    more: dict[str, Any] = {"softcap": 5.0, "sinks": torch.linspace(-1, 2, 4, device=DEVICE)}
    assert_modified(biased(inputs, mask, **more), inputs, mask, slopes=BY_HEAD.to(DEVICE), **more)


def test_the_cpu_backend_computes_the_same() -> None:
    inputs = gpu_inputs(300, 340, dim=64, batch=2)
    on_cpu = run_ours(tuple(x.cpu() for x in inputs), Causal(), alibi_slopes=BY_SEQUENCE)
    for mine, theirs in zip(biased(inputs, Causal(), BY_SEQUENCE), on_cpu, strict=True):
        assert largest_error(mine.cpu(), theirs) < 0.05


@pytest.mark.parametrize("dim", [64, 128, 192])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_bits_do_not_depend_on_batch_or_packing(mask: Mask, dim: int) -> None:
    lengths = ((500, 500), (300, 340), (1, 700), (1200, 1200))
    slopes = torch.rand(4, 4, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
    parts = make_parts("cuda", lengths, (4, 2), dim)
    packed = run_packed(parts, mask, alibi_slopes=slopes)
    for i, part in enumerate(parts):
        alone = biased(part, mask, slopes[i])
        assert_same_bits(packed[i], alone, f"sequence {i}")
    assert not same_bits(packed[0].out, biased(parts[0], mask, slopes[1]).out), "the control: other slopes"
    batch = tuple(torch.cat([part[i] for part in (parts[0], parts[0])]) for i in range(4))
    together = biased(batch, mask, slopes[[3, 0]])
    assert_same_bits(Results(*(x[1:] for x in together)), biased(parts[0], mask, slopes[0]), "second in a batch")


@pytest.mark.parametrize("causal", [True, False])
def test_documents_are_as_alone(causal: bool) -> None:
    batch = gpu_inputs(450, 450, dim=64, batch=2)
    found = biased(batch, Documents((160, 290), causal=causal), BY_SEQUENCE)
    for sequence in (0, 1):
        for rows in (slice(0, 160), slice(160, 450)):
            part = tuple(x[sequence : sequence + 1, rows].contiguous() for x in batch)
            alone = biased(part, Causal() if causal else Full(), BY_SEQUENCE[sequence])
            assert same_bits(found.out[sequence, rows], alone.out[0])
            assert same_bits(found.dk[sequence, rows], alone.dk[0])


def test_repeats_have_the_same_bits() -> None:
    inputs = gpu_inputs(1500, 1500, dim=128, batch=2)
    first = biased(inputs, Causal(), BY_SEQUENCE)
    for repeat in range(min(REPEATS, 50)):
        assert_same_bits(biased(inputs, Causal(), BY_SEQUENCE), first, f"repeat {repeat}")


def test_a_graph_reads_new_slopes() -> None:
    inputs, slopes = gpu_inputs(400, 400, dim=64, batch=2), BY_HEAD.to(DEVICE)
    graph, found = capture(lambda: biased(inputs, Causal(), slopes))
    for new in (BY_HEAD, BY_HEAD * 2):
        slopes.copy_(new)
        graph.replay()
        assert_same_bits(found, biased(inputs, Causal(), new), "replayed")


def test_what_is_not_served_raises() -> None:
    q, k, v, _ = gpu_inputs(64, 64, dim=64)
    with pytest.raises(Unsupported, match="without softcap, dropout and ALiBi; got alibi_slopes"):
        flash_attn_func(q, k, v, alibi_slopes=BY_HEAD.to(DEVICE), accumulation="unordered")
