"""Files of evidence: what ran in which part, with which outcome, on which machine, at which commit."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dash_attn.tools.machine import device_facts, package_commit, version_facts

FORMAT = 1
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SAVED_EVERY = 30.0  # seconds
Part = dict[str, Any]


def file_of(device: str) -> Path:
    return RESULTS / f"evidence-{device}.json"


def read(path: Path) -> list[Part]:
    if not path.exists():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    if found.get("format") != FORMAT:
        raise ValueError(f"{path} is not evidence of format {FORMAT}")
    parts: list[Part] = found["parts"]
    return parts


def new_part(kind: str, device: str, **about: Any) -> Part:
    """With what tells where it ran."""
    machine = {**device_facts(device), "cpus": os.cpu_count(), "system": platform.system()}
    versions = {name: version for name, version in version_facts(device, "auto").items() if name not in ("commit", "system") and version}
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    where = {"commit": package_commit(), "started": started, "machine": machine, "versions": versions}
    return {"kind": kind, "device": device, **about, **where}


class Recorder:
    """Keeps one part of a file up to date while it runs: whoever is killed leaves what was done. Nothing is written without a path."""

    def __init__(self, path: Path | None, part: Part) -> None:
        self.path, self.part, self.begun, self.saved = path, part, time.monotonic(), 0.0

    def keep(self, at_once: bool = False) -> None:
        seconds = time.monotonic() - self.begun
        if self.path is None or (not at_once and seconds - self.saved < SAVED_EVERY):
            return
        self.part["seconds"], self.saved = round(seconds, 1), seconds
        with alone_with(self.path):
            others = [part for part in read(self.path) if identity(part) != identity(self.part)]
            unfinished = self.path.with_suffix(".unfinished")
            unfinished.write_text(json.dumps({"format": FORMAT, "parts": [*others, self.part]}, indent=1) + "\n", encoding="utf-8")
            unfinished.replace(self.path)


def identity(part: Part) -> tuple[Any, ...]:
    return part["kind"], part["started"], part.get("seed"), part.get("first"), part.get("fault")


@contextmanager
def alone_with(path: Path) -> Iterator[None]:
    """Several parts may run side by side."""
    lock = path.with_suffix(".lock")
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    lock.unlink(missing_ok=True)


def until(minutes: float) -> Callable[[], bool]:
    """Whether there is time left."""
    end = time.monotonic() + 60 * minutes
    return lambda: time.monotonic() < end


def next_number(path: Path | None, device: str, seed: int) -> int:
    """The first number of a seed that no part has tried."""
    parts = [] if path is None else read(path)
    tried = [part for part in parts if part["kind"] == "calls" and (part["device"], part["seed"]) == (device, seed)]
    return max([part["first"] + part["calls"] for part in tried], default=0)


def one_thread() -> None:
    """Small products are quicker so, and processes do not wait for each other's cores."""
    torch.set_num_threads(1)
