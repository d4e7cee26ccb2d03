"""The tensors of one step become entries and sums. Sums stay on their devices until the step is over: one copy per device then."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .bit_sums import PartSums, part_sums
from .entries import Entry
from .leaves import strided


@dataclass(frozen=True)
class Collected:
    """Entries in execution order, the sum of each, and the first elements of each where they were kept."""

    entries: tuple[Entry, ...]
    sums: NDArray[np.uint64]
    kept: tuple[bytes, ...]


@dataclass
class Collector:
    """`keep`: how many first elements of every tensor are kept."""

    keep: int = 0
    entries: list[Entry] = field(default_factory=list)
    _sums: list[PartSums] = field(default_factory=list)
    _kept: list[Tensor] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # gradients of several devices arrive in several threads

    def add(self, named: Iterable[tuple[Entry, Tensor]], keep: int | None = None) -> None:
        """Record tensors as they are now. Their entries say where they are; dtype and shape are filled in."""
        found = [(replace(entry, tensor=name), leaf) for entry, tensor in named for name, leaf in strided(entry.tensor, tensor)]
        with self._lock, torch.no_grad():
            first = len(self.entries)
            keep = self.keep if keep is None else keep
            self.entries += [entry.of(leaf, keep) for entry, leaf in found]
            for part in part_sums([leaf for _, leaf in found]):
                self._sums.append(PartSums(part.sums, tuple(owner + first for owner in part.owners)))
            self._kept += [_first_octets(leaf, keep) for _, leaf in found]

    def collect(self) -> Collected:
        """Wait for the devices and copy everything to the host."""
        sums = np.zeros(len(self.entries), dtype=np.uint64)
        owners = [owner for part in self._sums for owner in part.owners]
        np.add.at(sums, owners, np.frombuffer(_to_host([part.sums for part in self._sums]), dtype=np.uint64))
        data, kept, start = _to_host(self._kept), [], 0
        for octets in self._kept:
            kept.append(data[start : start + len(octets)])
            start += len(octets)
        return Collected(tuple(self.entries), sums, tuple(kept))


def _first_octets(tensor: Tensor, count: int) -> Tensor:
    """A copy: the tensor may be changed before the step is over."""
    if count == 0 or tensor.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)
    first = tensor.detach().resolve_conj().resolve_neg().reshape(-1)[:count].clone()
    return (torch.view_as_real(first) if first.is_complex() else first).reshape(-1).view(torch.uint8)


def _to_host(tensors: list[Tensor]) -> bytes:
    """Bytes of all, in their order; one copy per device."""
    devices = dict.fromkeys(tensor.device for tensor in tensors)
    joined = {
        device: torch.cat([tensor.view(torch.uint8) for tensor in tensors if tensor.device == device]).cpu().numpy().tobytes()
        for device in devices
    }
    if len(joined) == 1:
        return next(iter(joined.values()))
    starts, pieces = dict.fromkeys(devices, 0), []
    for tensor in tensors:
        size, start = tensor.numel() * tensor.element_size(), starts[tensor.device]
        pieces.append(joined[tensor.device][start : start + size])
        starts[tensor.device] = start + size
    return b"".join(pieces)
