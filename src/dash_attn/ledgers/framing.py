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
PREFIX = struct.Struct("<cI")  # kind, bytes of the payload
CHECKSUMS = struct.Struct("<II")  # CRC-32 of the prefix, which tells a damaged length from a file that was cut off, and of the payload
FRAME_BYTES = PREFIX.size + CHECKSUMS.size
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

    @property
    def end(self) -> int:
        return self.place + FRAME_BYTES + len(self.payload)


def framed(kind: bytes, payload: bytes) -> bytes:
    prefix = PREFIX.pack(kind, len(payload))
    return prefix + CHECKSUMS.pack(zlib.crc32(prefix), zlib.crc32(payload)) + payload


def as_json(value: Any) -> bytes:
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode())


def from_json(payload: bytes) -> Any:
    return json.loads(zlib.decompress(payload))


def records(path: Path, data: bytes) -> Iterator[Record]:
    """All whole records. An unfinished one at the end is passed over; see `whole_bytes`."""
    check_mark(path, data)
    place = len(MARK)
    while len(data) >= place + FRAME_BYTES:
        kind, length = PREFIX.unpack_from(data, place)
        of_prefix, of_payload = CHECKSUMS.unpack_from(data, place + PREFIX.size)
        if of_prefix != zlib.crc32(data[place : place + PREFIX.size]):
            raise _damaged(path, data, place)
        start, end = place + FRAME_BYTES, place + FRAME_BYTES + length
        if end > len(data):
            return
        if kind not in KINDS or of_payload != zlib.crc32(data[start:end]):
            raise _damaged(path, data, place)
        yield Record(place, kind, data[start:end])
        place = end


def whole_bytes(path: Path, data: bytes) -> int:
    """How much of a file are whole records."""
    return max((record.end for record in records(path, data)), default=len(MARK))


def _damaged(path: Path, data: bytes, place: int) -> LedgerError:
    return LedgerError(f"{path} is damaged: the record at byte {place:,} of {len(data):,} does not match its checksum")


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
