"""The file of a rank: a mark, then records that each have a kind, a length and a checksum. Entries say what was recorded in a step.

Records are only ever appended, by one process at a time, so a crash can damage nothing but the end of the last one.
A full disk stops the ledger, not the training.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from ..errors import LedgerError
from ..formats import LEDGERS

if TYPE_CHECKING:  # ledgers are read and compared without PyTorch
    import torch
    from torch import Tensor

MARK = b"DASHLDG" + bytes([LEDGERS.newest])
PREFIX = struct.Struct("<cI")  # kind, bytes of the payload
CHECKSUMS = struct.Struct("<II")  # CRC-32 of the prefix, which tells a damaged length from a file that was cut off, and of the payload
FRAME_BYTES = PREFIX.size + CHECKSUMS.size
HEAD, LAYOUT, PLAN, STEP, END = KINDS = b"H", b"L", b"P", b"S", b"E"
STEP_FIELDS = struct.Struct("<qdBI")  # step, time, flags, number of the layout; then the sums, then the elements that were kept
IS_START, IS_DETAILED = 1, 2  # flags of a step
# The order in which a step runs. `recompute`: a forward inside the backward (activation checkpointing).
PHASES = ("batch", "forward", "loss", "backward", "recompute", "gradient", "weight", "optimizer", "rng")
DETAIL = ("forward", "backward", "recompute")  # phases of modules, recorded at some steps
SETTING, COUNT = "setting", "count"  # roles of what is recorded of an optimizer at every step
Plan = dict[str, Any]  # what decides the bits of a call of attention
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)  # what file systems without flock answer: some Lustre, some NFS


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
    """All whole records, one at a time. What a crash left behind the last one is passed over."""
    with path.open("rb") as file:
        _check_mark(path, file.read(len(MARK)))
        place = len(MARK)
        while (record := _record_at(path, file, place)) is not None:
            place = record.end
            yield record


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
    file.seek(place)
    solid = place + len(file.read().rstrip(b"\0"))  # behind it are zeros alone
    if solid < end:  # a machine that crashed had given the file its size, and not yet its bytes
        return None
    raise LedgerError(f"{path} is damaged: the record at byte {place:,} of {size:,} does not match its checksum")


def _check_mark(path: Path, data: bytes) -> None:
    if not data:
        raise LedgerError(f"{path} is empty: the run ended before it wrote anything")
    if data == MARK:
        return
    if MARK.startswith(data):
        raise LedgerError(f"{path} is cut off after {len(data)} bytes, before its first record")
    if data.startswith(MARK[:-1]):
        raise LedgerError(LEDGERS.unknown(data[len(MARK) - 1], str(path)))
    raise LedgerError(f"{path} is not a ledger: it begins with {data!r}, a ledger with {MARK!r}")


class Entry(NamedTuple):
    """What one recorded tensor is: where in a step it was, its dtype and shape. The sum over its bits is in the record of the step.

    `module` is the name in the model, "" the model itself; `call` counts its calls within the step.

    role: "input", "output", "parameter" or "buffer" of a module, "setting" or "count" of the optimizer; elsewhere "".
    caller: the module that ran when the tensor was seen; None outside of all.
    takers: modules that took the tensor as input, outermost first. Known for gradients in the backward.
    """

    phase: str
    module: str
    tensor: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    kept: int = 0
    role: str = ""
    call: int = 0
    caller: str | None = None
    takers: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """Equal for the same tensor in two runs."""
        return self.phase, self.module, self.role, self.tensor, self.call

    def of(self, name: str, tensor: Tensor, keep: int) -> Entry:
        """With what a tensor is. `name`: of the tensor, where it is a part of another one."""
        kept = min(keep, tensor.numel()) if keep else 0
        return _described(self, name, tensor.dtype, tensor.shape, kept)

    @property
    def itemsize(self) -> int:
        """Bytes of an element: names of dtypes have their bits, and those below a byte are stored in one."""
        bits = re.match(r"[a-z]+(\d+)", self.dtype)
        return 1 if bits is None else max(1, int(bits[1]) // 8)

    @staticmethod
    def from_json(fields: list[Any]) -> Entry:
        """From the list that JSON makes of it."""
        return _made(*(tuple(field) if isinstance(field, list) else field for field in fields))


@lru_cache(maxsize=2**16)  # steps record the same tensors, and the host's time is the run's
def _described(entry: Entry, name: str, dtype: torch.dtype, shape: torch.Size, kept: int) -> Entry:
    return entry._replace(tensor=name, dtype=str(dtype).removeprefix("torch."), shape=tuple(shape), kept=kept)


_made = lru_cache(maxsize=2**18)(Entry)  # layouts of one run, and of two, have most entries in common


class LedgerFile:
    """Opened for appending and locked until it is closed. `stopped` says why nothing is written any more."""

    def __init__(self, path: Path, append: bool) -> None:
        self.path, self.stopped = path, ""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._lock()
            self._end = 0
            self._prepare(append)
        except BaseException:
            os.close(self._file)
            raise

    def append(self, *records: tuple[bytes, bytes]) -> None:
        """Write (kind, payload) records, all or none."""
        if not self.stopped:
            self._write(b"".join(framed(kind, payload) for kind, payload in records))

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)  # unlocks, too
            self._file, self.stopped = -1, self.stopped or "it was closed"

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in NO_LOCKS:
                warnings.warn(
                    f"the ledger {self.path} is written without a lock, keep other processes from it: {error.strerror}",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return
            if not isinstance(error, BlockingIOError):
                raise
            raise LedgerError(
                f"another ledger writes to {self.path} at this moment: give every run a folder, and every rank its number"
            ) from None

    def _prepare(self, append: bool) -> None:
        """Get ready for the next record. What a crash left behind the last one is removed."""
        # Empty is also where a machine crashed before anything was on its disk, and left zeros.
        if not any(os.pread(self._file, len(MARK), 0)) and not any(os.pread(self._file, os.fstat(self._file).st_size, 0)):
            os.ftruncate(self._file, 0)
            self._write(MARK)
        elif append:
            self._end = max((record.end for record in records(self.path)), default=len(MARK))
            os.ftruncate(self._file, self._end)
        else:
            why = "choose another folder, or continue that run with resume_from=<its next step>"
            raise LedgerError(f"{self.path} has a run already: {why}")

    def _write(self, data: bytes) -> None:
        try:
            written = 0
            while written < len(data):
                written += self._write_at(data[written:], self._end + written)
            self._end += written
        except OSError as error:
            self._stop(error)

    def _write_at(self, data: bytes, place: int) -> int:
        return os.pwrite(self._file, data, place)

    def _stop(self, error: OSError) -> None:
        """Training goes on. What was written before stays readable: half a record is cut off again where possible."""
        self.stopped = error.strerror or str(error)
        with suppress(OSError):
            os.ftruncate(self._file, self._end)
        warnings.warn(
            f"the ledger {self.path} stops here, the training goes on: cannot write: {self.stopped}", RuntimeWarning, stacklevel=2
        )
