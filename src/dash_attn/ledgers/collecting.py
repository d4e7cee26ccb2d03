"""The tensors of one step become entries and sums. Sums stay on their devices until the step is over: one copy per device then."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .bit_sums import PartSums, part_sums
from .entries import Entry
from .leaves import strided


@dataclass(frozen=True)
class Collected:
    """The sum of each entry, and its first elements where they were kept."""

    sums: NDArray[np.uint64]
    kept: tuple[bytes, ...]


@dataclass
class Collector:
    """`keep`: how many first elements of every tensor are kept."""

    keep: int = 0
    entries: list[Entry] = field(default_factory=list)
    _sums: list[PartSums] = field(default_factory=list)
    _kept: dict[int, Tensor] = field(default_factory=dict)  # by place of the entry
    _lock: threading.Lock = field(default_factory=threading.Lock)  # gradients of several devices arrive in several threads

    def add(self, named: Iterable[tuple[Entry, Tensor]], keep: int | None = None) -> None:
        """Record tensors as they are now. Their entries say where they are; dtype and shape are filled in."""
        keep = self.keep if keep is None else keep
        found = [(entry, name, leaf) for entry, tensor in named for name, leaf in strided(entry.tensor, tensor)]
        with self._lock, torch.no_grad():
            first = len(self.entries)
            self.entries += [entry.of(name, leaf, keep) for entry, name, leaf in found]
            for part in part_sums([leaf for _, _, leaf in found]):
                self._sums.append(PartSums(part.sums, tuple(owner + first for owner in part.owners)))
            if keep:
                self._kept.update({first + place: _first_octets(leaf, keep) for place, (_, _, leaf) in enumerate(found)})

    def collect(self, order: Sequence[int]) -> Collected:
        """Wait for the devices and copy everything to the host. `order`: places of the entries, as they are wanted."""
        totals = np.zeros(len(self.entries), dtype=np.uint64)
        owners = np.array([owner for part in self._sums for owner in part.owners], dtype=np.intp)
        joined = _to_host([part.sums for part in self._sums])
        np.add.at(totals, owners, np.frombuffer(joined, dtype=np.uint64))
        return Collected(totals[order], self._kept_bytes(order))

    def _kept_bytes(self, order: Sequence[int]) -> tuple[bytes, ...]:
        data, start = _to_host(list(self._kept.values())), 0
        found: dict[int, bytes] = {}
        for place, octets in self._kept.items():
            found[place] = data[start : start + octets.numel()]
            start += octets.numel()
        return tuple(found.get(place, b"") for place in order)


def _first_octets(tensor: Tensor, count: int) -> Tensor:
    """A copy: the tensor may be changed before the step is over."""
    first = tensor.detach().reshape(-1)[:count].resolve_conj().resolve_neg().clone()
    return (torch.view_as_real(first) if first.is_complex() else first).view(-1).view(torch.uint8)


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
