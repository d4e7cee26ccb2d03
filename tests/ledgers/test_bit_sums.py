"""Sums over bits: what they see, what they do not depend on, and that they are what their definition says."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from dash_attn.ledgers import bit_sums
from dash_attn.ledgers.bit_sums import part_sums
from tensor_sums import bit_sum

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]
SHAPES = [(), (0,), (1,), (7,), (3, 5), (4, 0, 2), (2, 3, 4, 5), (1000,)]


def by_definition(tensor: Tensor) -> int:
    """Word by word in Python's integers."""
    tensor = tensor.contiguous().resolve_conj().resolve_neg()
    octets = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1).view(torch.uint8).numpy().tobytes()
    octets += bytes(-len(octets) % 8)
    total = 0
    for index in range(len(octets) // 8):
        word = int.from_bytes(octets[8 * index : 8 * index + 8], "little") + index * 0x9E3779B97F4A7C15 & 2**64 - 1
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            word = (word ^ word >> shift) * factor & 2**64 - 1
        total += word
    return total % 2**64


def some(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Random bits; of booleans, random booleans."""
    source = torch.Generator().manual_seed(1)
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=source).bool()
    count = torch.Size(shape).numel() * dtype.itemsize
    octets = torch.randint(256, (count,), generator=source, dtype=torch.uint8)
    return (octets.view(dtype) if count else torch.empty(0, dtype=dtype)).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_what_the_definition_says(dtype: torch.dtype) -> None:
    tensors = [some(dtype, shape) for shape in SHAPES]
    assert [bit_sum(tensor) for tensor in tensors] == [by_definition(tensor) for tensor in tensors]
    assert bit_sum(some(dtype, (0,))) == 0


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So that small tensors have several parts, and several share a group."""
    caches = (bit_sums._index_terms, bit_sums._places)
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setitem(bit_sums.CHUNK, "cpu", 16)
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.usefixtures("small_chunks")
def test_chunks_and_neighbours_do_not_matter() -> None:
    tensors = [some(dtype, shape) for dtype in (torch.float32, torch.bfloat16, torch.complex128) for shape in SHAPES]
    totals = [0] * len(tensors)
    groups = part_sums(tensors)
    for group in groups:
        for owner, part in zip(group.owners, group.sums.tolist(), strict=True):
            totals[owner] += part
    assert [total % 2**64 for total in totals] == [by_definition(tensor) for tensor in tensors]
    assert len(groups) > 100
    assert any(len(group.owners) > 2 for group in groups)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layout_does_not_matter(dtype: torch.dtype) -> None:
    tensor = some(dtype, (2, 3, 4, 5))
    expected = bit_sum(tensor)
    wide = torch.zeros(2, 3, 4, 11, dtype=dtype)
    wide[..., 1::2] = tensor
    same = [tensor.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2), wide[..., 1::2], tensor.reshape(-1), tensor.clone()]
    shifted = torch.cat([tensor.new_zeros(3), tensor.reshape(-1)])[3:]  # begins in the middle of a word
    if tensor.is_floating_point() and dtype != torch.float8_e4m3fn:
        same.append(tensor.to(memory_format=torch.channels_last))
    assert {bit_sum(one) for one in (*same, shifted)} == {expected}
    assert bit_sum(tensor.transpose(0, 1)) != expected  # another tensor in logical order


def test_lazy_conjugates_and_negatives_count() -> None:
    tensor = torch.randn(5, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    assert bit_sum(tensor.conj()) == bit_sum(tensor.conj().resolve_conj()) != bit_sum(tensor)
    assert bit_sum(tensor.conj().imag) == bit_sum(-tensor.imag) != bit_sum(tensor.imag)


def xor_hash(tensor: Tensor) -> int:
    """The control, as torch.hash_tensor does it: no index, and bits that cancel."""
    return int(np.bitwise_xor.reduce(tensor.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.itemsize]).numpy()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_swap_is_seen(dtype: torch.dtype) -> None:
    """Of elements that are a word, and of elements that share one with others."""
    tensor = torch.randn(300_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    for one, other in ((0, 1), (5, 6), (17, 250_000), (131_071, 131_073), (0, 2 * 2**16 * 2)):  # in a word, across chunks
        swapped = tensor.clone()
        swapped[[one, other]] = tensor[[other, one]]
        assert bit_sum(swapped) != bit_sum(tensor)
        assert xor_hash(swapped) == xor_hash(tensor)


def test_equal_flips_are_seen() -> None:
    tensor = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    for bit in range(32):
        flipped = tensor.clone()
        flipped.view(torch.int32)[[100, 3000]] ^= torch.tensor(1 << bit).to(torch.int32)
        assert bit_sum(flipped) != bit_sum(tensor)
        assert xor_hash(flipped) == xor_hash(tensor)
    assert bit_sum(-tensor) != bit_sum(tensor)


def test_every_single_bit_counts_and_sums_do_not_collide() -> None:
    """Of all tensors that differ from a tensor of zeros in one or two bits of two words."""
    sums = [bit_sum(torch.zeros(2, dtype=torch.int64))]
    for word in range(2):
        for bit in range(64):
            tensor = torch.zeros(2, dtype=torch.int64)
            tensor[word] = bit_sums.signed(1 << bit)
            sums.append(bit_sum(tensor))
            tensor[1 - word] = bit_sums.signed(1 << bit)
            if word == 0:
                sums.append(bit_sum(tensor))
    assert len(set(sums)) == len(sums) == 1 + 64 * 3


def test_zeros_and_nans_are_told_apart() -> None:
    assert bit_sum(torch.tensor(0.0)) != bit_sum(torch.tensor(-0.0))
    quiet, other = (torch.tensor(bits, dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert quiet.isnan()
    assert other.isnan()
    assert bit_sum(quiet) != bit_sum(other)


def test_it_leaves_random_numbers_and_the_tensor_alone() -> None:
    tensor, state = torch.randn(1000, requires_grad=True), torch.get_rng_state()
    before = tensor.detach().clone()
    bit_sum(tensor)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(tensor, before)
