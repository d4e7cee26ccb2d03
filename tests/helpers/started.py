"""Starts a process that has ended when a test is done with it, whatever becomes of the test."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


@contextmanager
def started(command: Sequence[str], preexec_fn: Callable[[], object] = int, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Killed at the end of the block, with what it has started itself; and by Linux, if this process dies before."""

    def prepare() -> None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        preexec_fn()

    with subprocess.Popen(command, preexec_fn=prepare, start_new_session=True, **options) as process:  # leaving it closes pipes and waits
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
