"""Appending to the file of one rank: one process at a time, and a full disk stops the ledger, not the training."""

from __future__ import annotations

import errno
import fcntl
import os
import warnings
from contextlib import suppress
from pathlib import Path

from .framing import MARK, LedgerError, framed, whole_bytes

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)  # what file systems without flock answer: some Lustre, some NFS


class LedgerFile:
    """Opened for appending and locked until it is closed. `stopped` says why nothing is written any more."""

    def __init__(self, path: Path, append: bool) -> None:
        self.path, self.stopped = path, ""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._lock()
            self._end = self._prepare(append)
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

    def _prepare(self, append: bool) -> int:
        """The place of the next record. What a crash left behind the last record is removed."""
        if self._is_empty():
            os.ftruncate(self._file, 0)
            self._end = 0
            self._write(MARK)
            return self._end
        if not append:
            raise LedgerError(
                f"{self.path} has a run already: choose another folder, or continue that run with resume_from=<its next step>"
            )
        end = whole_bytes(self.path)
        os.ftruncate(self._file, end)
        return end

    def _is_empty(self) -> bool:
        """Also where a machine crashed before anything was on its disk, and left zeros."""
        return not any(os.pread(self._file, len(MARK), 0)) and not any(os.pread(self._file, os.fstat(self._file).st_size, 0))

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
