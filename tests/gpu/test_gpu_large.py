"""Long sequences, and tensors of more than 2^31 elements: no offset may be kept in 32 bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from budget import assert_near
from dash_attn import Causal, Full, Mask, Window, flash_attn_varlen_func
from dense import Results, assert_same_bits, run_ours
from devices import make_inputs, require
from gpu_helpers import poisoned_memory
from packed_batches import places
from sampled_rows import at_keys, at_queries, worst

pytestmark = pytest.mark.gpu

LIMIT = 2**31
LENGTH, HEADS, DIM = 8192, 32, 128
SEQUENCES = LIMIT // (LENGTH * HEADS * DIM) + 1
NARROW = Window(256, 0)  # few tiles a query, so that the size is in the tensors and not in the work


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("mask", [Full(), Causal(), Window(3000, 500)], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_20000_tokens(dim: int, mask: Mask) -> None:
    inputs = make_inputs("cuda", (20000, 20000), (1, 1), (dim, 0))
    ours = run_ours(inputs, mask)
    assert_near(ours, inputs, mask)
    assert_same_bits(run_ours(inputs, mask), ours, "again")


@pytest.mark.parametrize("length", [65_536, 131_072, 262_144])
def test_long_sequences(length: int) -> None:
    """The same bits again, in dirty memory; at some queries and keys they are those of the definition."""
    inputs = make_inputs("cuda", (length, length), (1, 1), (128, 0))
    ours = run_ours(inputs, Causal())
    with poisoned_memory():
        assert_same_bits(run_ours(inputs, Causal()), ours, "again")
    some = torch.tensor([0, 1, 63, 64, 127, 128, length // 2, length - 129, length - 1], device="cuda")
    assert worst(at_queries(inputs, ours, some)) < 1
    assert worst(at_keys(inputs, ours, some)) < 1


def one_of(tensors: tuple[Tensor, ...], place: int) -> tuple[Tensor, ...]:
    return tuple(x[place : place + 1] for x in tensors)


def last_head(results: Results) -> Results:
    return Results(*(x[:, -1:] if name == "lse" else x[:, :, -1:] for name, x in results._asdict().items()))


def assert_like_alone(ours: Results, inputs: tuple[Tensor, ...], place: int) -> None:
    """A sequence of the large batch has the bits it has alone, and is right."""
    alone = run_ours(one_of(inputs, place), NARROW)
    assert_same_bits(Results(*one_of(ours, place)), alone, f"sequence {place}")
    assert_near(last_head(alone), tuple(x[:, :, -1:] for x in one_of(inputs, place)), NARROW)


def test_more_than_2_to_the_31_elements() -> None:
    inputs = make_inputs("cuda", (LENGTH, LENGTH), (HEADS, HEADS), (DIM, 0), batch=SEQUENCES)
    assert min(x.numel() for x in inputs) > LIMIT
    ours = run_ours(inputs, NARROW)
    for place in (0, SEQUENCES - 1):
        assert_like_alone(ours, inputs, place)


def test_views_into_more_than_2_to_the_31_elements() -> None:
    """q, k and v are small enough by themselves, but lie far apart."""
    batch = SEQUENCES // 3 + 1
    qkv = torch.stack(make_inputs("cuda", (LENGTH, LENGTH), (HEADS, HEADS), (DIM, 0), batch=batch)[:3], 2)
    assert qkv.numel() > LIMIT > qkv[:, :, 0].numel()
    inputs = (*qkv.unbind(2), make_inputs("cuda", (LENGTH, LENGTH), (HEADS, HEADS), (DIM, 0), batch=batch, seed=1)[3])
    ours = run_ours(inputs, NARROW)
    for place in (0, batch - 1):
        assert_like_alone(ours, inputs, place)


def test_a_packed_batch_of_more_than_2_to_the_31_elements() -> None:
    require("cuda", "varlen")
    lengths = [LENGTH] * SEQUENCES
    inputs = make_inputs("cuda", (LENGTH, LENGTH), (HEADS, HEADS), (DIM, 0), batch=SEQUENCES)
    leaves = [x.flatten(0, 1).requires_grad_() for x in inputs[:3]]
    ends = places(lengths, "cuda")
    out, lse = flash_attn_varlen_func(*leaves, ends, ends, LENGTH, LENGTH, mask=NARROW, return_lse=True)
    gradients = torch.autograd.grad(out, leaves, inputs[3].flatten(0, 1))
    by_sequence = [x.detach().unflatten(0, (SEQUENCES, LENGTH)) for x in (out, *gradients)]
    ours = Results(by_sequence[0], lse.unflatten(1, (SEQUENCES, LENGTH)).transpose(0, 1), *by_sequence[1:])
    for place in (0, SEQUENCES - 1):
        assert_like_alone(ours, inputs, place)
