"""Other work on the same device, so that runs are timed and interleaved differently than on an idle device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

WORKERS = 2  # threads; on a GPU each with a stream of its own
ELEMENTS = 2**24  # of a tensor that a GPU's SMs and memory are kept busy with
SIZE = 256  # of a matrix that the CPU multiplies
PATIENCE = 120.0  # seconds until the work must have begun


@contextmanager
def other_work(device: str) -> Iterator[None]:
    """The device is busy with something else inside this block. Raises if that something fails: the test would be empty."""
    # Every thread has a current device of its own.
    prepare = partial(_gpu_work, torch.cuda.current_device()) if device == "cuda" else _cpu_work
    stop, begun = threading.Event(), [threading.Event() for _ in range(WORKERS)]
    failures: list[BaseException] = []

    def run(ready: threading.Event) -> None:
        try:
            once = prepare()
            while not stop.is_set():
                once()
                ready.set()
        except BaseException as error:
            failures.append(error)
            ready.set()

    threads = [threading.Thread(target=run, args=(ready,), daemon=True) for ready in begun]
    for thread in threads:
        thread.start()
    try:
        if not all(ready.wait(PATIENCE) for ready in begun):
            raise RuntimeError("the other work has not begun")
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if failures:
        raise RuntimeError(f"the other work failed, so nothing ran beside it: {failures[0]}") from failures[0]


def _gpu_work(index: int) -> Callable[[], None]:
    """Elementwise, because matrix products ask for settings of their own while deterministic algorithms are on."""
    stream = torch.cuda.Stream(index)
    values = torch.ones(ELEMENTS, device=torch.device("cuda", index))
    torch.cuda.synchronize(index)

    def once() -> None:
        with torch.cuda.stream(stream):
            for _ in range(20):
                values.cos_()
        stream.synchronize()

    return once


def _cpu_work() -> Callable[[], None]:
    matrix = np.full((SIZE, SIZE), 1 / SIZE, dtype=np.float32)

    def once() -> None:
        matrix @ matrix

    return once
