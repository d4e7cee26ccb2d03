"""Deals a row document by document, so that devices have equal work."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ..problem import whole_number

UNIT = 128  # rows that every tile divides
LEAST_TILES = 4  # of a chunk; of 1 to 8, this had the best predictions (docs/log.md)
Chunk = tuple[int, int]  # rows, device


def deal_by_document(lengths: Sequence[int], devices: int) -> list[Chunk]:
    """The chunks of a row, in its order. A document is dealt in zigzag if its chunks are long enough, or if it is more than the share of
    a device. The others go whole to the device with the fewest rows, longest first."""
    rows = [0] * whole_number("devices", devices)
    share = sum(whole_number("the length of a document", length) for length in lengths) / devices
    dealt: dict[int, list[Chunk]] = {}
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        long = lengths[place] >= 2 * devices * LEAST_TILES * UNIT or lengths[place] > share
        dealt[place] = _zigzag(lengths[place], devices) if long else [(lengths[place], rows.index(min(rows)))]
        for length, device in dealt[place]:
            rows[device] += length
    if 0 in rows:
        raise ValueError(
            f"{len(lengths)} documents of {sum(lengths)} rows cannot be dealt to {devices} devices in whole tiles of {UNIT} rows: device"
            f" {rows.index(0)} would have none. Sharding.zigzag and Sharding.contiguous deal rows without looking at documents"
        )
    return [chunk for place in range(len(lengths)) for chunk in dealt[place]]


def _zigzag(length: int, devices: int) -> list[Chunk]:
    """In chunks of whole tiles, as equal as can be."""
    there = [*range(devices), *reversed(range(devices))]
    tiles = -(-length // UNIT)
    ends = [min(UNIT * (tiles * number // len(there)), length) for number in range(len(there) + 1)]
    return [(end - begin, device) for (begin, end), device in zip(pairwise(ends), there, strict=True) if end > begin]
