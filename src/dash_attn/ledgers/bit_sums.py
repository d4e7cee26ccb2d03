"""A 64-bit sum over the bits of a tensor, computed where the tensor is, without waiting for the device.

A tensor is its elements in logical order, little-endian, cut into words of 64 bits; the last word is filled up with zeros. Each word is
mixed with its index, and the mixed words are added modulo 2^64. Integer sums have no order, so the result depends neither on strides nor
on how a device divides the work. The index makes a swap visible; the mixing is not linear, so equal flips do not cancel.

On Hopper GPUs a kernel has the same sums, in the time that reading the tensors takes (backends/hopper/kernels/ledger). Elsewhere they
are made of PyTorch's operations.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

WORD = 8  # bytes
INDEX = 0x9E3779B97F4A7C15  # odd, 2^64 over the golden ratio: neighbouring indices become distant numbers
# Shifts and odd factors of a well-known 64-bit finaliser (SplitMix64's). A flip of any bit changes about half of the result.
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
CHUNK = {"cpu": 2**16}  # words: half a megabyte stays in a core's cache
LARGE_CHUNK = 2**22  # on other devices: fewer launches
Numbered = tuple[int, Tensor]


def signed(number: int) -> int:
    """The int64 with these 64 bits."""
    number %= 2**64
    return number - 2**64 if number >> 63 else number


def in_logical_order(tensor: Tensor) -> Tensor:
    """The bits of a strided tensor, one element behind the other: the tensor itself where it is so."""
    tensor = tensor.detach().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.contiguous()


def words_of(tensor: Tensor) -> Tensor:
    """The bits of a strided tensor as int64, in logical order."""
    octets = in_logical_order(tensor).view(-1).view(torch.uint8)
    missing = -octets.numel() % WORD
    if missing:
        octets = torch.cat([octets, octets.new_zeros(missing)])
    elif octets.storage_offset() % WORD:  # a view of words has to begin at one
        octets = octets.clone()
    return octets.view(torch.int64)


@dataclass(frozen=True)
class PartSums:
    """Sums on a device. A tensor's sum is that of all parts with its number: `owners[i]` is the number of part i."""

    sums: Tensor
    owners: tuple[int, ...]


class _Part(NamedTuple):
    words: Tensor
    size: int
    first: int  # index of its first word in the tensor
    owner: int


@torch.no_grad()
def part_sums(tensors: Sequence[Tensor]) -> list[PartSums]:
    """Sums of many tensors; small ones share their launches."""
    with_kernel: dict[torch.device, list[Numbered]] = {}
    others: list[Numbered] = []
    for owner, tensor in enumerate(tensors):
        (with_kernel.setdefault(tensor.device, []) if _has_kernel(tensor.device) else others).append((owner, tensor))
    return [*map(_sums_by_kernel, with_kernel.values()), *map(_sums_of, _groups(others))]


@lru_cache(maxsize=64)
def _has_kernel(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    from ..backends.hopper.calls.bit_sums import has_kernel

    return has_kernel(device.index)


def _sums_by_kernel(tensors: Sequence[Numbered]) -> PartSums:
    from ..backends.hopper.calls.bit_sums import bit_sums

    return PartSums(bit_sums([in_logical_order(tensor) for _, tensor in tensors]), tuple(owner for owner, _ in tensors))


def _groups(tensors: Iterable[Numbered]) -> Iterable[list[_Part]]:
    """Parts of one device that fill a chunk together."""
    waiting: dict[torch.device, list[_Part]] = {}
    held: dict[torch.device, int] = {}
    for owner, tensor in tensors:
        words = words_of(tensor)
        device, length = words.device, words.numel()
        chunk = CHUNK.get(device.type, LARGE_CHUNK)
        for first in range(0, length, chunk):
            size = min(chunk, length - first)
            if held.get(device, 0) + size > chunk:
                yield waiting.pop(device)
                held[device] = 0
            part = words if size == length else words[first : first + size]
            waiting.setdefault(device, []).append(_Part(part, size, first, owner))
            held[device] = held.get(device, 0) + size
    yield from waiting.values()


def _sums_of(group: list[_Part]) -> PartSums:
    device, owners = group[0].words.device, tuple(part.owner for part in group)
    if len(group) == 1:
        words, size, first, _ = group[0]
        mixed = torch.add(words, _index_terms(device)[:size]).add_(signed(first * INDEX))
        return PartSums(_mix(mixed).sum().reshape(1), owners)
    ends, shifts = _places(tuple(part.size for part in group), tuple(part.first for part in group), device)
    mixed = torch.cat([part.words for part in group])
    mixed.add_(_index_terms(device)[: len(mixed)])
    mixed.add_(torch.repeat_interleave(shifts, ends.diff(prepend=ends.new_zeros(1)), output_size=len(mixed)))
    totals = _mix(mixed).cumsum(0)[ends - 1]  # wraps modulo 2^64, as the sum does
    return PartSums(totals.diff(prepend=totals.new_zeros(1)), owners)


def _mix(words: Tensor) -> Tensor:
    """In place. Shifts fill with zeros: int64 has only the shift that repeats the sign, so that is masked away."""
    shifted = torch.empty_like(words)
    for shift, factor in ROUNDS:
        torch.bitwise_right_shift(words, shift, out=shifted)
        words.bitwise_xor_(shifted.bitwise_and_(2 ** (64 - shift) - 1))
        if factor != 1:
            words.mul_(signed(factor))
    return words


@lru_cache(maxsize=16)
def _index_terms(device: torch.device) -> Tensor:
    count = CHUNK.get(device.type, LARGE_CHUNK)
    return torch.arange(count, device=device).mul_(signed(INDEX))


@lru_cache(maxsize=1024)
def _places(lengths: tuple[int, ...], firsts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Where the parts of a group end, and what to add so that each has the indices of its tensor. A model asks the same every step."""
    ends, shifts, end = [], [], 0
    for length, first in zip(lengths, firsts, strict=True):
        shifts.append(signed((first - end) * INDEX))
        end += length
        ends.append(end)
    on_device = [torch.tensor(numbers).to(device, non_blocking=True) for numbers in (ends, shifts)]
    return on_device[0], on_device[1]
