"""A sequence's bits do not depend on what is around it: batch mates, their number, lengths and values, offsets, room."""

from __future__ import annotations

import pytest
import torch

from dash_attn import Causal, Documents, Full, Mask, Window
from dense import Results, assert_same_bits, run_ours, same_bits
from devices import dim_features, make_inputs, on_each_device, require
from gpu_helpers import Inputs, ragged_map
from packed_batches import Lengths, make_parts, run_packed

N = 333
BANDS = [Full(), Causal(), Window(100, 30)]
PAIRS = [*((mask, dim) for mask in BANDS for dim in (64, 128, 256, 111)), (Documents((200, 133)), 128), (ragged_map(N, N), 128)]


def one_of(tensors: tuple[torch.Tensor, ...], place: int) -> tuple[torch.Tensor, ...]:
    return tuple(x[place : place + 1] for x in tensors)


@pytest.mark.parametrize(("mask", "dim"), PAIRS, ids=str)
@on_each_device
def test_the_batch_around_a_sequence(device: str, mask: Mask, dim: int) -> None:
    """Alone, in the middle, repeated, beside other values, beside NaN."""
    require(device, *dim_features(dim))
    batch = make_inputs(device, (N, N), (2, 1), (dim, 0), batch=3)
    chosen: Inputs = one_of(batch, 1)  # type: ignore[assignment]
    alone = run_ours(chosen, mask)
    for what, around in {
        "in the middle": batch,
        "other values": tuple(torch.cat([x[:1] + 1, one, x[2:] * 3]) for x, one in zip(batch, chosen, strict=True)),
        "its own copies": tuple(one.repeat(3, 1, 1, 1) for one in chosen),
        "beside NaN": tuple(torch.cat([x[:1] * torch.nan, one, x[2:] * torch.inf]) for x, one in zip(batch, chosen, strict=True)),
    }.items():
        assert_same_bits(Results(*one_of(run_ours(around, mask), 1)), alone, what)


@pytest.mark.parametrize("scheduled", ["auto", "ascending", "weave"])
@on_each_device
def test_a_large_batch(device: str, scheduled: str) -> None:
    """More chains than workers: the last sequence starts when the first ones have long ended."""
    batch = make_inputs(device, (N, N), (2, 1), (64, 0), batch=8 if device == "cpu" else 200)
    together = run_ours(batch, Causal(), schedule=scheduled)
    for place in (0, len(batch[0]) // 2, len(batch[0]) - 1):
        alone = run_ours(one_of(batch, place), Causal(), schedule=scheduled)
        assert_same_bits(Results(*one_of(together, place)), alone, f"sequence {place}")


AROUND: dict[str, tuple[Lengths, int]] = {
    "alone": (((200, 300),), 0),
    "first": (((200, 300), (77, 64)), 0),
    "last": (((1, 1), (300, 500), (200, 300)), 2),
    "between long ones": (((700, 700), (200, 300), (700, 700)), 1),
    "between empty ones": (((0, 0), (200, 300), (0, 0)), 1),
    "between ones": (((1, 1), (1, 1), (200, 300), (1, 1)), 2),
    "between halves": (((0, 5), (200, 300), (5, 0)), 1),
    "many": (((13, 17),) * 20 + ((200, 300),), 20),
}


def surround(device: str, around: Lengths, place: int, chosen: Inputs, **rest: int) -> list[Inputs]:
    parts = make_parts(device, around, (2, 1), seed=7, **rest)
    assert parts[place][0].shape == chosen[0].shape
    return [*parts[:place], chosen, *parts[place + 1 :]]


@pytest.mark.parametrize("mask", BANDS, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256, 111])
@on_each_device
def test_packed_with_others(device: str, dim: int, mask: Mask) -> None:
    require(device, "varlen", *dim_features(dim))
    chosen = make_inputs(device, (200, 300), (2, 1), (dim, 0))
    alone = run_ours(chosen, mask)
    for what, (around, place) in AROUND.items():
        for room in (0, 1000):  # the longest lengths may be given with room to spare
            packed = run_packed(surround(device, around, place, chosen, dim=dim), mask, room)
            assert_same_bits(packed[place], alone, f"{what}, {room} to spare")


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("mask", BANDS, ids=str)
@on_each_device
def test_a_neighbour_that_has_overflowed(device: str, mask: Mask, poison: float) -> None:
    """A tile that reaches into the next sequence meets its NaN with weight 0, and 0 times NaN is NaN."""
    require(device, "varlen")
    chosen = make_inputs(device, (200, 300), (2, 1))
    alone = run_ours(chosen, mask)
    parts = surround(device, ((90, 90), (200, 300), (90, 90)), 1, chosen)
    poisoned = [parts[0], chosen, parts[2]]
    for neighbour in (0, 2):
        poisoned[neighbour] = tuple(torch.full_like(x, poison) for x in parts[neighbour])  # type: ignore[call-overload]
    packed = run_packed(poisoned, mask)
    assert packed[0].out.isnan().any(), "the control: the neighbour is poisoned"
    assert_same_bits(packed[1], alone)


@on_each_device
def test_the_order_of_packed_sequences(device: str) -> None:
    require(device, "varlen")
    parts = make_parts(device, ((70, 70), (200, 330), (1, 1), (140, 90)), (2, 1))
    there, back = run_packed(parts, Causal()), run_packed(parts[::-1], Causal())[::-1]
    for place, (one, other) in enumerate(zip(there, back, strict=True)):
        assert_same_bits(one, other, f"sequence {place}")


@on_each_device
def test_bits_would_show_a_different_order(device: str) -> None:
    """The control of this file: the same sequence summed in another order has other bits."""
    inputs = make_inputs(device, (1000, 1000), (2, 1))
    up, down = (run_ours(inputs, Causal(), schedule=name) for name in ("ascending", "descending"))
    assert not same_bits(up.dk, down.dk)
