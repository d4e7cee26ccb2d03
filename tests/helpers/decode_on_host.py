"""Kernels of the forward and of decode on the host: a driver that runs them where the other would launch."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from ctypes import c_char_p, c_int, c_int64, c_void_p
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from compilers import needs_gxx
from dash_attn.backends.hopper.driver.compile import sources

HERE = Path(__file__).parent.parent / "backends" / "decode_on_host"
ON_HOST = ("common/ptx.cuh", "common/cluster.cuh", "common/wgmma.cuh")
ENDED = {1: "it hangs", 3: "there is no such kernel on the host"}


class HostMap(ctypes.Structure):
    """As in decode_on_host/common/ptx.cuh; as large as a CUtensorMap."""

    _fields_ = [
        ("base", c_void_p),
        ("sizes", c_int * 4),
        ("box_rows", c_int),
        ("box_columns", c_int),
        ("strides", c_int64 * 4),
        ("rest", ctypes.c_char * 64),
    ]


class Map:
    """Stands in for TensorMap."""

    def __init__(self, tensor: Tensor, rows: int, columns: int = 64) -> None:
        batch, length, heads, dim = tensor.shape
        strides = [2 * tensor.stride(axis) for axis in (3, 2, 1, 0)]
        self._map = HostMap(tensor.data_ptr(), (c_int * 4)(dim, heads, length, batch), rows, columns, (c_int64 * 4)(*strides))

    @property
    def address(self) -> int:
        return ctypes.addressof(self._map)

    def point_to(self, pointer: int) -> None:
        self._map.base = pointer


class Stopped(RuntimeError):
    """A kernel reported trouble: what, x, y."""


@dataclass
class Machine:
    library: ctypes.CDLL
    seed: int = 0

    def load(self, device: int, header: str, name: str, threads: int, shared_bytes: int) -> Kernel:
        return Kernel(self, name, threads)


@dataclass
class Kernel:
    machine: Machine
    name: str
    threads: int

    def prepare(self, grid: int, addresses: list[int]) -> Launch:
        return Launch(self, grid, addresses)


@dataclass
class Launch:
    kernel: Kernel
    grid: int
    addresses: list[int]

    def on(self, stream: Any) -> None:
        kernel, machine = self.kernel, self.kernel.machine
        cluster = _ctas_of_cluster(kernel.name) if "cluster" in kernel.name else 1
        pointers, reported = (c_void_p * len(self.addresses))(*self.addresses), (c_int * 3)()
        machine.seed += 1
        ended = machine.library.run(kernel.name.encode(), self.grid, cluster, kernel.threads, pointers, machine.seed, reported)
        if ended == 2:
            raise Stopped(*reported)
        if ended:
            raise RuntimeError(f"{kernel.name}: {ENDED[ended]}")


def _ctas_of_cluster(kernel: str) -> int:
    _, dim, columns, _ = kernel.split(",")
    return int(dim) // int(columns)


class OnHost:
    """The one call of the driver that is left: counters are set to 0."""

    @staticmethod
    def cuMemsetD32Async(address: int, value: int, count: int, stream: Any) -> tuple[int]:
        ctypes.memset(address, value, 4 * count)
        return (0,)


def build(folder: Path, *defined: str) -> Machine:
    """With some macros of library.cpp defined, which decide the kernels that there are."""
    for name, text in sources().items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text((HERE / name).read_text() if name in ON_HOST else text)
    for name in ("shim.h", "library.cpp"):
        shutil.copy(HERE / name, folder / name)
    options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-Wno-psabi", "-I", str(folder)]
    options += [f"-D{name}" for name in defined]
    subprocess.run([needs_gxx(), *options, str(folder / "library.cpp"), "-o", str(folder / "kernels.so")], check=True)
    library = ctypes.CDLL(str(folder / "kernels.so"))
    library.run.argtypes = [c_char_p, c_int, c_int, c_int, ctypes.POINTER(c_void_p), c_int, ctypes.POINTER(c_int)]
    return Machine(library)


class Stream:
    def synchronize(self) -> None:
        """The tables are there."""


class Event:
    def record(self, stream: Stream) -> None:
        """What was launched has run."""


STREAM = Stream()


@contextmanager
def hopper_on_host(machine: Machine, columns: int = 0) -> Iterator[tuple[Any, Any]]:
    """The modules calls.forward and calls.decode, which take tensors on the CPU meanwhile."""
    names = ("forward", "decode", "layout", "tables", "kernel_names", "mask_bits")
    forward, decode, layout, tables, kernel_names, bits = (import_module(f"dash_attn.backends.hopper.calls.{name}") for name in names)
    kept = import_module("dash_attn.backends.kept").Kept
    everywhere = {
        "sm_count": lambda index: 1,
        "TensorMap": Map,
        "current_stream": lambda index: 0,
        "raise_if_troubled": lambda: None,
        "on_device": lambda index: nullcontext(),
        "cuda_driver": OnHost,
    }
    changes: list[tuple[Any, str, Any]] = [(module, name, value) for module in (forward, decode) for name, value in everywhere.items()]
    changes += [(module, "device_index", lambda device: 0) for module in (layout, decode, bits)]
    changes += [
        (kernel_names, "load_kernel", machine.load),
        *((module, "on_device", lambda index: nullcontext()) for module in (layout, bits)),
        (bits, "current_stream", lambda index: 0),
        (bits, "_sent", lambda array, device: torch.from_numpy(array)),
        (forward, "_calls", layout.CallCache(forward._calls._prepare)),
        (forward, "prepare_counters", lambda device: None),
        (forward, "shared_counter", lambda device, stream: None),
        (decode, "report_address", lambda: 0),
        (decode, "CLUSTERS", tuple((dim, columns, 10**6) for dim in (64, 128) if 0 < columns < dim)),
        (decode, "_calls", kept(64)),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "current_stream", lambda device=None: STREAM),
        (torch.cuda, "Event", Event),
    ]
    known = import_module("dash_attn.attention.known")._known
    cached = (tables.visits_on_device, tables.mask_on_device, known)
    with ExitStack() as stack:
        for module, name, value in changes:
            stack.enter_context(patch.object(module, name, value))
        for one in cached:
            one.cache_clear()
        try:
            yield forward, decode
        finally:
            for one in cached:
                one.cache_clear()
