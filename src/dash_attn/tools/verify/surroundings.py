"""Other surroundings of the same cases.

Other work on the same device, so that runs are timed and interleaved differently than on an idle device.
Processes of their own: another address space, another hash seed, nothing cached in memory. The first of them compiles every kernel
anew, into an empty cache; the second finds that cache.

Run as `python -m dash_attn.tools.verify.surroundings FOLDER DEVICE BACKEND`: reads FOLDER/cases.json, leaves the results
of case i in FOLDER/i.pt.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from ...attention.functions import flash_attn_func
from .cases import Case, Results, attend, make_inputs

WORKERS = 2  # threads; on a GPU each with a stream of its own
ELEMENTS = 2**24  # of a tensor that a GPU's SMs and memory are kept busy with
SIZE = 256  # of a matrix that the CPU multiplies
PATIENCE = 120.0  # seconds until the work must have begun
PROCESSES = ("a fresh process with a cold cache", "a fresh process with a warm cache")


@contextmanager
def other_work(device: str) -> Iterator[None]:
    """The device is busy with something else inside this block. Raises if that something fails: the test would be empty."""
    # Every thread has a current device of its own.
    prepare = partial(_gpu_work, torch.cuda.current_device()) if device == "cuda" else _cpu_work
    stop, begun = threading.Event(), [threading.Event() for _ in range(WORKERS)]

    def run(ready: threading.Event) -> None:
        try:
            once = prepare()
            while not stop.is_set():
                once()
                ready.set()
        finally:
            ready.set()

    with ThreadPoolExecutor(WORKERS) as pool:
        running = [pool.submit(run, ready) for ready in begun]
        try:
            if not all(ready.wait(PATIENCE) for ready in begun):
                raise RuntimeError("the other work has not begun")
            yield
        finally:
            stop.set()
    failures = [error for one in running if (error := one.exception()) is not None]
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


def _cpu_work() -> Callable[[], object]:
    matrix = np.full((SIZE, SIZE), 1 / SIZE, dtype=np.float32)
    return lambda: matrix @ matrix


def fresh_results(cases: Sequence[Case], device: str, backend: str = "auto") -> dict[str, list[Results]]:
    """What new processes compute for each case, by what is special about them."""
    with TemporaryDirectory(prefix="dash-attn-verify-") as name:
        folder = Path(name)
        (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]), encoding="utf-8")
        (folder / "cache").mkdir()
        return {process: _one_process(folder, device, backend, len(cases)) for process in PROCESSES}


def _one_process(folder: Path, device: str, backend: str, cases: int) -> list[Results]:
    command = [sys.executable, "-m", __name__, str(folder), device, backend]
    caches = {"DASH_ATTN_CACHE": str(folder / "cache"), "TRITON_CACHE_DIR": str(folder / "triton")}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": "random", **caches})
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ValueError(f"the fresh process failed with exit code {done.returncode}: {last}")
    return [Results(*torch.load(folder / f"{i}.pt", weights_only=True)) for i in range(cases)]


def _main(folder: Path, device: str, backend: str) -> None:
    cases = [Case(**case) for case in json.loads((folder / "cases.json").read_text(encoding="utf-8"))]
    for i, case in enumerate(cases):
        results = attend(case, make_inputs(case, device), partial(flash_attn_func, backend=backend))
        torch.save(list(results), folder / f"{i}.pt")


if __name__ == "__main__":
    _main(Path(sys.argv[1]), *sys.argv[2:])
