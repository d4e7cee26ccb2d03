"""The tensors of one step become entries and sums. Sums stay on their devices until the step is over: one copy per device then.

Nothing waits for a GPU: copies are under way when a step returns, and are read when the next one is recorded.
"""

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
from .host_copies import HostCopies
from .leaves import strided


@dataclass(frozen=True)
class Collected:
    """The sum of each entry, and its first elements where they were kept."""

    sums: NDArray[np.uint64]
    kept: tuple[bytes, ...]


@dataclass(frozen=True)
class UnderWay:
    """What was collected, on its way to the host."""

    order: tuple[int, ...]  # places of the entries, as they are wanted
    owners: tuple[int, ...]  # of the sums
    kept_sizes: dict[int, int]  # bytes, by place of the entry
    sums: HostCopies
    kept: HostCopies

    @property
    def on_host(self) -> bool:
        """Whether everything was on the host from the beginning, so that `collected` waits for nothing."""
        return self.sums.on_host and self.kept.on_host

    def collected(self) -> Collected:
        """Waits for the copies."""
        totals = np.zeros(max((*self.order, *self.owners), default=-1) + 1, dtype=np.uint64)
        np.add.at(totals, np.array(self.owners, dtype=np.intp), np.frombuffer(self.sums.wait(), dtype=np.uint64))
        return Collected(totals[list(self.order)], self._kept_bytes())

    def _kept_bytes(self) -> tuple[bytes, ...]:
        data, start = self.kept.wait(), 0
        found: dict[int, bytes] = {}
        for place, size in self.kept_sizes.items():
            found[place] = data[start : start + size]
            start += size
        return tuple(found.get(place, b"") for place in self.order)


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

    def collect(self, order: Sequence[int]) -> UnderWay:
        """Start to copy everything to the host. `order`: places of the entries, as they are wanted."""
        return UnderWay(
            tuple(order),
            tuple(owner for part in self._sums for owner in part.owners),
            {place: octets.numel() for place, octets in self._kept.items()},
            HostCopies([part.sums for part in self._sums]),
            HostCopies(list(self._kept.values())),
        )


def _first_octets(tensor: Tensor, count: int) -> Tensor:
    """A copy: the tensor may be changed before the step is over."""
    first = tensor.detach().reshape(-1)[:count].resolve_conj().resolve_neg().clone()
    return (torch.view_as_real(first) if first.is_complex() else first).view(-1).view(torch.uint8)
