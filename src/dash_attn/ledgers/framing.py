"""The file of a ledger: a mark, then records that each have a kind, a length and a checksum.

Records are only ever appended, so a crash can damage nothing but the end of the last one.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

VERSION = 1
MARK = b"DASHLDG" + bytes([VERSION])
FRAME = struct.Struct("<cII")  # kind, bytes of the payload, CRC-32 of kind and payload
HEAD, LAYOUT, PLAN, STEP, END = b"H", b"L", b"P", b"S", b"E"
KINDS = (HEAD, LAYOUT, PLAN, STEP, END)
STEP_FIELDS = struct.Struct("<qdBI")  # step, time, flags, number of the layout; then the sums, then the elements that were kept
IS_START, IS_DETAILED = 1, 2  # flags of a step


class LedgerError(ValueError):
    """A ledger that cannot be written or read, with the reason."""


class Record(NamedTuple):
    place: int  # of its first byte in the file
    kind: bytes
    payload: bytes


def framed(kind: bytes, payload: bytes) -> bytes:
    return FRAME.pack(kind, len(payload), zlib.crc32(payload, zlib.crc32(kind))) + payload


def as_json(value: Any) -> bytes:
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode())


def from_json(payload: bytes) -> Any:
    return json.loads(zlib.decompress(payload))


def records(path: Path, data: bytes) -> Iterator[Record]:
    """All whole records. An unfinished one at the end is passed over; see `whole_bytes`."""
    check_mark(path, data)
    place = len(MARK)
    while (payload := _payload_at(data, place)) is not None:
        kind, length, checksum = FRAME.unpack_from(data, place)
        if kind not in KINDS or checksum != zlib.crc32(payload, zlib.crc32(kind)):
            raise LedgerError(f"{path} is damaged: the record at byte {place:,} of {len(data):,} does not match its checksum")
        yield Record(place, kind, payload)
        place += FRAME.size + length


def whole_bytes(path: Path, data: bytes) -> int:
    """How much of a file are whole records."""
    end = len(MARK)
    for record in records(path, data):
        end = record.place + FRAME.size + len(record.payload)
    return end


def check_mark(path: Path, data: bytes) -> None:
    if not data:
        raise LedgerError(f"{path} is empty: the run ended before it wrote anything")
    if data[: len(MARK)] == MARK:
        return
    if len(data) < len(MARK) and MARK.startswith(data):
        raise LedgerError(f"{path} is cut off after {len(data)} bytes, before its first record")
    if data.startswith(MARK[:-1]):
        raise LedgerError(f"{path} has format {data[len(MARK) - 1]} of ledgers; this version of dash-attn reads format {VERSION}")
    raise LedgerError(f"{path} is not a ledger: it begins with {data[: len(MARK)]!r}, a ledger with {MARK!r}")


def _payload_at(data: bytes, place: int) -> bytes | None:
    """None where the file ends before the record does."""
    if len(data) < place + FRAME.size:
        return None
    start = place + FRAME.size
    end = start + FRAME.unpack_from(data, place)[1]
    return data[start:end] if end <= len(data) else None
