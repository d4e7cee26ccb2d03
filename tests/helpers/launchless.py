"""A driver that launches nothing, so that calls of the Hopper backend run to their launches without a GPU, on tensors of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dash_attn.backends import import_backend, run

CALLS = ("forward", "backward", "backward_setup", "rank_backward", "kernel_names", "layout", "leg_tables", "packed", "tables")


@dataclass
class Driver:
    """Notes which kernels would have run, and with how many blocks."""

    launched: list[tuple[str, int]] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def load(self, device: int, header: str, name: str, threads: int, shared_bytes: int) -> Any:
        self.loaded.append(name)
        return Kernel(self, name.split("<")[0], Compiled(name))


@dataclass
class Compiled:
    sha256: str
    origin: str = "compiled here, NVRTC 13.0"


@dataclass
class Kernel:
    driver: Driver
    name: str
    kernel: Compiled

    def prepare(self, grid: int, addresses: list[int], cooperative: bool = False, early: bool = False) -> Launch:
        assert grid > 0
        assert not (cooperative and early)
        return Launch(self, grid)


@dataclass
class Launch:
    kernel: Kernel
    grid: int

    def on(self, stream: Any) -> None:
        self.kernel.driver.launched.append((self.kernel.name, self.grid))


class Map:
    address = 0

    def __init__(self, tensor: Tensor, rows: int) -> None:
        assert rows <= 256
        assert tensor.shape[-1] % 8 == 0, "TMA needs strides of 16 bytes"

    def point_to(self, pointer: int) -> None:
        assert pointer % 16 == 0


class NothingToReset:
    @staticmethod
    def cuMemsetD32Async(*_: Any) -> tuple[int]:
        return (0,)


class Stream:
    def synchronize(self) -> None:
        """The tables are there."""


def _changes(driver: Driver) -> Iterator[tuple[Any, str, Any]]:
    """(module, name, value): what stands for the GPU."""
    names = [import_module(f"dash_attn.backends.hopper.calls.{name}") for name in CALLS]
    forward, backward, setup, rank_backward, kernel_names, layout, leg_tables, packed, _ = names
    yield kernel_names, "load_kernel", driver.load
    for module in (forward, setup, packed, rank_backward):
        yield module, "sm_count", lambda index: 132
    for module in (forward, backward, rank_backward):
        yield module, "TensorMap", Map
        yield module, "current_stream", lambda index: 0
        yield module, "raise_if_troubled", lambda: None
    for module in (forward, backward):
        yield module, "_calls", layout.CallCache(module._calls._prepare)
    for module in (forward, backward, layout, rank_backward):
        yield module, "on_device", lambda index: nullcontext()
    for module in (setup, packed):
        yield module, "report_address", lambda: 0
    yield forward, "cuda_driver", NothingToReset
    yield forward, "prepare_counters", lambda device: None
    yield forward, "shared_counter", lambda device, stream: None
    for module in (layout, rank_backward):
        yield module, "device_index", lambda device: 0
    yield leg_tables, "_kept", type(leg_tables._kept)(64)
    yield torch.cuda, "is_current_stream_capturing", lambda: False
    yield torch.cuda, "current_stream", lambda device=None: Stream()


@contextmanager
def launchless_driver() -> Iterator[Driver]:
    tables = import_module("dash_attn.backends.hopper.calls.tables")
    known = import_module("dash_attn.attention.known")._known
    kept = (tables.plan_on_device, tables.visits_on_device, tables.mask_on_device, known)
    driver = Driver()
    with ExitStack() as stack:
        for module, name, value in _changes(driver):
            stack.enter_context(patch.object(module, name, value))
        for cached in kept:
            cached.cache_clear()
            stack.callback(cached.cache_clear)
        yield driver


@contextmanager
def calls_on_hopper() -> Iterator[Driver]:
    """Tensors on the CPU run on this backend."""
    with launchless_driver() as driver, patch.object(run, "backend_for", lambda *_: import_backend("hopper")):
        yield driver
