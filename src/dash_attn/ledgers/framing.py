"""The file of a ledger: a mark, then records that each have a kind, a length and a checksum.

Records are only ever appended, so a crash can damage nothing but the end of the last one.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

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


def records(path: Path) -> Iterator[Record]:
    """All whole records, one at a time. What a crash left behind the last one is passed over; see `whole_bytes`."""
    with path.open("rb") as file:
        check_mark(path, file.read(len(MARK)))
        place: int | None = len(MARK)
        while place is not None:
            record = _record_at(path, file, place)
            place = None if record is None else record.end
            if record is not None:
                yield record


def whole_bytes(path: Path) -> int:
    """How much of a file are whole records."""
    return max((record.end for record in records(path)), default=len(MARK))


def _record_at(path: Path, file: BinaryIO, place: int) -> Record | None:
    """None: the file ends here, or what is here was not finished."""
    size, end = os.fstat(file.fileno()).st_size, place + FRAME_BYTES
    frame = file.read(FRAME_BYTES)
    if len(frame) < FRAME_BYTES:
        return None
    kind, length = PREFIX.unpack_from(frame)
    of_prefix, of_payload = CHECKSUMS.unpack_from(frame, PREFIX.size)
    if of_prefix == zlib.crc32(frame[: PREFIX.size]):
        end += length
        if end > size:
            return None
        payload = file.read(length)
        if kind in KINDS and of_payload == zlib.crc32(payload):
            return Record(place, kind, payload)
    if _solid_end(file, place) < end:  # a machine that crashed had given the file its size, and not yet its bytes
        return None
    raise LedgerError(f"{path} is damaged: the record at byte {place:,} of {size:,} does not match its checksum")


def _solid_end(file: BinaryIO, place: int) -> int:
    """Behind it are zeros alone."""
    file.seek(place)
    return place + len(file.read().rstrip(b"\0"))


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
