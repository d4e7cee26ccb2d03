"""Everything the checks look at, read once. Reading changes nothing: it imports no library that is not there yet."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ...backends.gpus import HOPPER

START_ENVIRONMENT = Path("/proc/self/environ")  # Linux keeps what a process was started with


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: tuple[int, int]
    amd: bool = False

    @property
    def is_hopper(self) -> bool:
        return self.capability == HOPPER and not self.amd


@dataclass(frozen=True)
class Snapshot:
    """A process. The defaults are a CPU process in which nothing is wrong, so that a test plants one fault at a time."""

    deterministic: bool = True
    warn_only: bool = False
    fill_uninitialized: bool = True
    tf32: tuple[str, ...] = ()  # where it is allowed
    reduced_precision: tuple[str, ...] = ()  # dtypes whose products may be summed in that dtype
    cudnn_benchmark: bool = False
    cudnn_deterministic: bool = True
    max_autotune: bool = False  # of torch.compile, where it is loaded
    sdpa: tuple[str, ...] = ()  # enabled backends with an unordered backward
    environment: Mapping[str, str] = field(default_factory=lambda: {"PYTHONHASHSEED": "0"})
    started_with: Mapping[str, str] | None = None  # None: not known on this system
    modules: frozenset[str] = frozenset()
    cuda: bool = False
    cuda_initialized: bool = False
    gpu: Gpu | None = None  # None: no GPU, or not asked because that would initialise CUDA
    cuda_bindings: bool = True
    triton: bool = True
    kernels: str | None = None  # where ours come from, in words
    torch_version: str = "2.9.0"
    world_size: int = 1


def take_snapshot(ask_gpu: bool = False) -> Snapshot:
    """This process now. `ask_gpu` may initialise CUDA, which a training script should do at a time of its own."""
    cuda, initialized = torch.cuda.is_available(), torch.cuda.is_initialized()
    return Snapshot(
        deterministic=torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        fill_uninitialized=bool(import_module("torch.utils.deterministic").fill_uninitialized_memory),
        tf32=_tf32(),
        reduced_precision=_reduced_precision(),
        cudnn_benchmark=torch.backends.cudnn.benchmark,
        cudnn_deterministic=torch.backends.cudnn.deterministic,
        max_autotune=_max_autotune(),
        sdpa=_unordered_sdpa(),
        environment=dict(os.environ),
        started_with=_started_with(),
        modules=frozenset(name for name, module in sys.modules.items() if module is not None),
        cuda=cuda,
        cuda_initialized=initialized,
        gpu=_gpu() if cuda and (initialized or ask_gpu) else None,
        cuda_bindings=_has_cuda_bindings(),
        triton=find_spec("triton") is not None,
        kernels=_kernels() if cuda else None,
        torch_version=torch.__version__,
        world_size=_world_size(),
    )


def _tf32() -> tuple[str, ...]:
    """By the newer switch alone: reading the older `allow_tf32` raises once a script has set the newer one."""
    backends: Any = torch.backends
    places = {"matmul": backends.cuda.matmul, "cudnn.conv": backends.cudnn.conv, "cudnn.rnn": backends.cudnn.rnn}
    return tuple(name for name, place in places.items() if place.fp32_precision == "tf32")


def _reduced_precision() -> tuple[str, ...]:
    """A setting may be a bool or a pair (reduced precision, split-K), by version of PyTorch."""
    matmul: Any = torch.backends.cuda.matmul
    settings = {name: getattr(matmul, f"allow_{name}_reduced_precision_reduction") for name in ("bf16", "fp16")}
    return tuple(name for name, value in settings.items() if (value[0] if isinstance(value, tuple) else value))


def _max_autotune() -> bool:
    config = sys.modules.get("torch._inductor.config")
    return bool(getattr(config, "max_autotune", False))


def _unordered_sdpa() -> tuple[str, ...]:
    enabled = {"cudnn": torch.backends.cuda.cudnn_sdp_enabled(), "mem_efficient": torch.backends.cuda.mem_efficient_sdp_enabled()}
    return tuple(name for name, on in enabled.items() if on)


def _started_with() -> dict[str, str] | None:
    try:
        entries = os.fsdecode(START_ENVIRONMENT.read_bytes()).split("\0")
    except OSError:
        return None
    return {name: value for name, _, value in (entry.partition("=") for entry in entries if entry)}


def _gpu() -> Gpu:
    return Gpu(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), torch.version.hip is not None)


def _has_cuda_bindings() -> bool:
    try:
        return find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        return False


def _kernels() -> str:
    """Those loaded so far by origin, else what the first call will find. Our own modules, which load no library."""
    driver = sys.modules.get("dash_attn.backends.hopper.driver.launch")
    if driver is not None and driver.origins:
        return "; ".join(f"{count} {origin}" for origin, count in sorted(Counter(driver.origins.values()).items()))
    compiler = import_module("dash_attn.backends.hopper.driver.shipped").shipped_compiler()
    where = "none came with the package, so the NVRTC at hand compiles them" if compiler is None else f"shipped, NVRTC {compiler}"
    return f"none loaded yet; {where}"


def _world_size() -> int:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return 1
    return int(distributed.get_world_size())
