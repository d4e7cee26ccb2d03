"""Runs a function in several processes of torch.distributed (gloo), and returns what each gave."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Worker = Callable[[int], Any]
# Ranks are forks of a process that has imported this and done nothing: imports take seconds per process, and gloo starts in the fork.
# Forks hash strings alike. Ranks that do not are those of examples/long_context.py, which tests/project/test_examples.py runs.
multiprocessing.set_forkserver_preload(["torch.distributed.tensor", "torch._dynamo", "dash_attn.attention"])


class Group:
    """`worker` on `count` ranks. As a variable of a test module it may run beside other tests (tests/conftest.py): most groups wait.

    worker: a function of a module, so that processes can import it. group_limit: seconds a rank waits for another. limit: seconds for all;
    processes that run longer are killed.
    """

    def __init__(self, worker: Worker, count: int, group_limit: float = 60, limit: float = 240) -> None:
        self.worker, self.count, self.group_limit, self.limit = worker, count, group_limit, limit
        self.context: mp.ProcessContext | None = None

    def start(self) -> None:
        self.folder = TemporaryDirectory()
        arguments = (self.worker, self.count, self.folder.name, self.group_limit)
        self.context = mp.start_processes(_enter, arguments, nprocs=self.count, join=False, start_method="forkserver")

    def is_running(self) -> bool:
        return self.context is not None and any(process.is_alive() for process in self.context.processes)

    def stop(self) -> None:
        for process in self.context.processes if self.context else ():
            process.kill()

    @cached_property
    def found(self) -> list[Any]:
        """By rank; None of a process that ended early."""
        if self.context is None:
            self.start()
        end = time.monotonic() + self.limit
        try:
            while not self.context.join(timeout=1):  # type: ignore[union-attr]
                if time.monotonic() > end:
                    raise TimeoutError(f"{self.worker} on {self.count} processes has not ended after {self.limit} s")
        finally:
            self.stop()
        with self.folder as folder:
            files = [Path(folder) / f"result-{rank}" for rank in range(self.count)]
            return [torch.load(file, weights_only=False) if file.exists() else None for file in files]


def run_processes(worker: Worker, count: int, **limits: float) -> list[Any]:
    """What a group found."""
    return Group(worker, count, **limits).found


def said(action: Callable[[], object]) -> str:
    """The error of what must not work."""
    try:
        return f"no error: {action()}"
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def _enter(rank: int, worker: Worker, count: int, folder: str, group_limit: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # what PyTorch sends it when its parent has died; ignored in a background job
    torch.set_num_threads(1)  # as many in every process, whatever the machine
    store = dist.FileStore(f"{folder}/store", count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=group_limit))
    # Gloo's first connections fail if a rank ends while another still makes them: go on when all have theirs.
    store.set(f"connected-{rank}", "")
    store.wait([f"connected-{other}" for other in range(count)])
    torch.save(worker(rank), Path(folder) / f"result-{rank}")
    dist.destroy_process_group()
