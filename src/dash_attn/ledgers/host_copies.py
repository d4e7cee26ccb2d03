"""Tensors on their way to the host: one copy per device, into memory that a GPU writes to without anybody waiting."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class HostCopies:
    """Copies are under way when this is made; `wait` waits for them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._places = [(tensor.device, tensor.nbytes) for tensor in tensors]
        devices = dict.fromkeys(device for device, _ in self._places)
        joined = {device: torch.cat([tensor.view(torch.uint8) for tensor in tensors if tensor.device == device]) for device in devices}
        self._copies = {device: _copy(octets) for device, octets in joined.items()}

    @property
    def on_host(self) -> bool:
        return all(event is None for _, event in self._copies.values())

    def wait(self) -> bytes:
        """Of all tensors, in their order."""
        for _, event in self._copies.values():
            if event is not None:
                event.synchronize()
        joined = {device: copy.numpy().tobytes() for device, (copy, _) in self._copies.items()}
        if len(joined) == 1:
            return next(iter(joined.values()))
        starts, pieces = dict.fromkeys(joined, 0), []
        for device, size in self._places:
            pieces.append(joined[device][starts[device] : starts[device] + size])
            starts[device] += size
        return b"".join(pieces)


def _copy(octets: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    if octets.device.type != "cuda":
        return octets.cpu(), None
    copy = torch.empty(octets.shape, dtype=octets.dtype, pin_memory=True)
    with torch.cuda.device(octets.device):
        copy.copy_(octets, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    return copy, event
