"""The tensors of one step become entries and sums. Sums stay on their devices until the step is over: one copy per device then.

Nothing waits for a GPU: copies are under way when a step returns, and are read when the next one is recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from .bit_sums import PartSums, part_sums
from .entries import Entry
from .tensors import strided


class HostCopies:
    """Tensors on their way to the host: one copy per device, into memory that a GPU writes to without anybody waiting.

    Copies are under way when this is made; `wait` waits for them.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._places = [(tensor.device, tensor.nbytes) for tensor in tensors]
        devices = dict.fromkeys(device for device, _ in self._places)
        joined = {device: torch.cat([tensor.view(torch.uint8) for tensor in tensors if tensor.device == device]) for device in devices}
        self._copies = {device: _copy(octets) for device, octets in joined.items()}

    @property
    def on_host(self) -> bool:
        return all(event is None for _, event in self._copies.values())

    def wait(self) -> list[bytes]:
        """Of each tensor."""
        for _, event in self._copies.values():
            if event is not None:
                event.synchronize()
        joined = {device: copy.numpy().tobytes() for device, (copy, _) in self._copies.items()}
        starts, pieces = dict.fromkeys(joined, 0), []
        for device, size in self._places:
            pieces.append(joined[device][starts[device] : starts[device] + size])
            starts[device] += size
        return pieces


def _copy(octets: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    if octets.device.type != "cuda":
        return octets.cpu(), None
    copy = torch.empty(octets.shape, dtype=octets.dtype, pin_memory=True)
    with torch.cuda.device(octets.device):
        copy.copy_(octets, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    return copy, event


@dataclass(frozen=True)
class UnderWay:
    """What was collected, on its way to the host."""

    order: tuple[int, ...]  # places of the entries, as they are wanted
    owners: tuple[int, ...]  # of the sums
    keepers: tuple[int, ...]  # entries whose first elements were kept
    sums: HostCopies
    kept: HostCopies

    @property
    def on_host(self) -> bool:
        """Whether everything was on the host from the beginning, so that `wait` waits for nothing."""
        return self.sums.on_host and self.kept.on_host

    def wait(self) -> bytes:
        """The sum of each entry, then first elements where they were kept: as a record has them."""
        totals = np.zeros(max((*self.order, *self.owners), default=-1) + 1, dtype=np.uint64)
        np.add.at(totals, np.array(self.owners, dtype=np.intp), np.frombuffer(b"".join(self.sums.wait()), dtype=np.uint64))
        kept = dict(zip(self.keepers, self.kept.wait(), strict=True))
        return totals[list(self.order)].astype(np.dtype("<u8")).tobytes() + b"".join(kept.get(place, b"") for place in self.order)


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
        owners = tuple(owner for part in self._sums for owner in part.owners)
        sums, kept = HostCopies([part.sums for part in self._sums]), HostCopies(list(self._kept.values()))
        return UnderWay(tuple(order), owners, tuple(self._kept), sums, kept)


def _first_octets(tensor: Tensor, count: int) -> Tensor:
    """A copy: the tensor may be changed before the step is over."""
    first = tensor.detach().reshape(-1)[:count].resolve_conj().resolve_neg().clone()
    return (torch.view_as_real(first) if first.is_complex() else first).view(-1).view(torch.uint8)
