"""Values on a GPU that must be the same on every rank. Copies come to the host when they come, and later calls compare them: no host
waits for a GPU."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

NAMES = ("the sinks", "dropout_seed", "alibi_slopes")
NUMBERS = 1 + len(NAMES)  # in a message


class LateValues:
    """Of one rank. Each message tells up to which call values are here. The next one has a hash of all values up to the call that every
    rank had then. So ranks compare the same calls, at the same call, whenever their copies came."""

    def __init__(self) -> None:
        self._coming: deque[tuple[int, Any, list[Tensor | None]]] = deque()  # call, event behind the copies, copies
        self._here = self._everywhere = 0  # calls whose values have come: to this rank, to all
        self._hashes = {0: [0] * len(NAMES)}  # by call: of all values up to it

    def keep(self, call: int, tensors: Sequence[Tensor | None]) -> None:
        """Of NAMES. All ranks keep those of the same calls."""
        given = [x for x in tensors if x is not None]
        if given and given[0].is_cuda and not torch.cuda.is_current_stream_capturing():
            copies = [None if x is None else x.detach().to("cpu", non_blocking=True) for x in tensors]
            self._coming.append((call, torch.cuda.current_stream(given[0].device).record_event(), copies))

    def tell(self) -> list[int]:
        while self._coming and self._coming[0][1].query():
            call, _, copies = self._coming.popleft()
            self._hashes[call] = [_hash(*pair) for pair in zip(self._hashes[self._here], copies, strict=True)]
            self._here = call
        return [self._here, *self._hashes[self._everywhere]]

    def hear(self, rows: Sequence[Sequence[int]]) -> None:
        """What all ranks told."""
        for place, name in enumerate(NAMES, 1):
            odd = next((rank for rank, row in enumerate(rows) if row[place] != rows[0][place]), None)
            if odd is not None:
                last = self._everywhere
                self.__init__()  # type: ignore[misc]  # on every rank: what follows may be right
                raise RuntimeError(
                    f"ranks that share a sequence must be asked for the same; rank 0 and rank {odd} differ in the values of {name}, in a"
                    f" call up to number {last} of the group (values on a GPU are compared when they have come to the host)"
                )
        self._everywhere = min(row[0] for row in rows)
        self._hashes = {call: hashes for call, hashes in self._hashes.items() if call >= self._everywhere}


def _hash(before: int, x: Tensor | None) -> int:
    """63 bits, to fit a signed number."""
    values = b"" if x is None else x.contiguous().view(torch.uint8).numpy().tobytes()
    return int.from_bytes(hashlib.sha256(before.to_bytes(8, "big") + values).digest()[:8], "big") >> 1
