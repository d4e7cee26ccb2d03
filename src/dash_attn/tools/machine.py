"""What there is to know of a machine and of a process on it: GPU, driver, versions, commit, variables, PyTorch's settings.

Results of benchmarks, heads of ledgers, certificates and the doctor have their facts from here. Their names stand in files, so they stay.
"""

import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from ..backends import resolve
from ..backends.gpus import HOPPER

SMI_FIELDS = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu")
VARIABLES = ("CUBLAS", "CUDA", "CUDNN", "DASH_ATTN", "MKL", "NCCL", "NVIDIA", "OMP", "PYTHONHASHSEED", "PYTORCH", "TORCH", "TRITON")
LAUNCHER = "TORCHELASTIC"  # torchrun's own: names of its files and of the run
INSTALLED = ("numpy", "transformers", "triton", "cuda-bindings")
PACKAGES = ("numpy", "transformers", "accelerate", "triton", "lightning", "deepspeed", "flash_attn")
START_ENVIRONMENT = Path("/proc/self/environ")  # Linux keeps what a process was started with


def gpu_environment(backend: str = "auto") -> dict[str, Any]:
    """Where a benchmark ran: the current GPU, its clocks, what makes the machine code of a backend."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "sms": properties.multi_processor_count,
        **driver_facts(),
        **_versions(),
        "cudnn": torch.backends.cudnn.version(),
        **compilers(backend),
        "commit": package_commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def process_environment() -> dict[str, Any]:
    """What may explain why another process computed something else. Nothing is imported and CUDA is not initialised for it."""
    loaded = {name: getattr(sys.modules.get(name), "__version__", None) for name in PACKAGES}
    versions = {**_versions(), **{name: version and str(version) for name, version in loaded.items()}}
    in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "argv": list(sys.argv),
        "folder": os.getcwd(),
        "versions": {name: version for name, version in versions.items() if version},
        "platform": platform.platform(),
        "cpu": {"machine": platform.machine(), "capability": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()},
        "gpu": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())] if in_use else [],
        "git": _commit(None, " with changes", seconds=5),
        "variables": {
            name: os.environ[name] for name in sorted(os.environ) if name.startswith(VARIABLES) and not name.startswith(LAUNCHER)
        },
    }


def device_facts(device: str) -> dict[str, Any]:
    """Of a certificate."""
    if device == "cpu":
        return {"type": "cpu", "name": platform.machine(), "capability": torch.backends.cpu.get_cpu_capability()}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    capability = f"{properties.major}.{properties.minor}"
    driver = driver_facts().get("driver_version")
    return {"type": "cuda", "name": properties.name, "capability": capability, "sms": properties.multi_processor_count, "driver": driver}


def version_facts(device: str, backend: str) -> dict[str, str | None]:
    """Of a certificate: another version may give other machine code."""
    found = {**_versions(), "commit": package_commit(), "system": platform.system()}
    return {**found, **compilers(backend)} if device == "cuda" else found


def compilers(backend: str) -> dict[str, str | None]:
    """What makes the machine code of a backend on the current GPU."""
    if resolve(backend, torch.device("cuda", torch.cuda.current_device())) == "triton":
        from ..backends.triton.support import triton_version

        return {"triton": triton_version()}
    from ..backends.hopper.driver.compile import compiler_at_hand, shipped_compiler

    return {"nvrtc": compiler_at_hand(), "packed_nvrtc": shipped_compiler()}  # of the kernels that came with the package


def short_name(gpu: str) -> str:
    """`NVIDIA H100 80GB HBM3` is h100."""
    found = re.search(r"\b([A-Z]+\d+[A-Z]*)\b", gpu)
    return (found.group(1) if found else re.sub(r"\W+", "-", gpu).strip("-")).lower()


def driver_facts() -> dict[str, str]:
    """What nvidia-smi says, where there is one."""
    said = _output(["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader", f"--id={torch.cuda.current_device()}"])
    values = [value.strip() for value in (said or "").split(",")]
    return dict(zip(SMI_FIELDS, values, strict=True)) if len(values) == len(SMI_FIELDS) else {}


def package_commit() -> str | None:
    """The commit of the source tree this package runs from, with a + if files have changed since."""
    if "DASH_ATTN_COMMIT" in os.environ:  # of a copy of the sources, whose history is not theirs
        return os.environ["DASH_ATTN_COMMIT"]
    return _commit(Path(__file__).parent, "+")


def _commit(folder: Path | None, changed: str, seconds: float = 20) -> str | None:
    """Of a folder, by default the one the process is in; `changed` is added where files differ from it."""
    head = _output(["git", "rev-parse", "HEAD"], folder, seconds)
    if not head:
        return None
    return head.strip() + (changed if _output(["git", "status", "--porcelain", "--untracked-files=no"], folder, seconds) else "")


def _output(command: list[str], folder: Path | None = None, seconds: float = 20) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=folder, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _versions() -> dict[str, str | None]:
    return {"python": platform.python_version(), "dash_attn": __version__, "torch": str(torch.__version__), "cuda": torch.version.cuda}


def installed_versions() -> dict[str, str]:
    """What this environment has, by the names that files have for it. Of libraries, NVRTC alone is loaded for it."""
    from ..backends.hopper.driver.compile import compiler_at_hand, shipped_compiler
    from ..invariance.record import driver_version

    found = {**_versions(), "driver": driver_version(), "nvrtc": compiler_at_hand(), "packed_nvrtc": shipped_compiler()}
    for name in INSTALLED:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return {name: found[name] or "" for name in found if found[name]}


def is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@contextmanager
def deterministic_algorithms(warn_only: bool = False, fill: bool = False) -> Iterator[None]:
    """PyTorch's switch, on in this block. `fill`: new memory is filled, which PyTorch does only while the switch is on."""
    settings: Any = import_module("torch.utils.deterministic")
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = fill
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = filled


def bits_of(x: Tensor) -> Tensor:
    """As integers: -0.0 differs from 0.0, and NaN equals itself."""
    return x.contiguous().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[x.element_size()])


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: tuple[int, int]
    amd: bool = False

    @property
    def is_hopper(self) -> bool:
        return self.capability == HOPPER and not self.amd


def current_gpu() -> Gpu | None:
    """This may initialise CUDA, which a training script should do at a time of its own."""
    if not torch.cuda.is_available():
        return None
    return Gpu(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), torch.version.hip is not None)


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


def _unordered_sdpa() -> tuple[str, ...]:
    enabled = {"cudnn": torch.backends.cuda.cudnn_sdp_enabled(), "mem_efficient": torch.backends.cuda.mem_efficient_sdp_enabled()}
    return tuple(name for name, on in enabled.items() if on)


def _started_with() -> dict[str, str] | None:
    try:
        entries = os.fsdecode(START_ENVIRONMENT.read_bytes()).split("\0")
    except OSError:
        return None
    return {name: value for name, _, value in (entry.partition("=") for entry in entries if entry)}


def _kernels() -> str:
    """Those loaded so far by origin, else what the first call will find. Our own modules, which load no library."""
    driver = sys.modules.get("dash_attn.backends.hopper.driver.launch")
    if driver is not None and driver.origins:
        return "; ".join(f"{count} {origin}" for origin, count in sorted(Counter(driver.origins.values()).items()))
    compiler = import_module("dash_attn.backends.hopper.driver.compile").shipped_compiler()
    where = "none came with the package, so the NVRTC at hand compiles them" if compiler is None else f"shipped, NVRTC {compiler}"
    return f"none loaded yet; {where}"


@dataclass(frozen=True)
class Snapshot:
    """Everything that decides whether this process is reproducible, read once: `Snapshot()` is this process now.

    Reading changes nothing: it imports no library that is not there yet, and does not initialise CUDA.
    """

    deterministic: bool = field(default_factory=lambda: torch.are_deterministic_algorithms_enabled())
    warn_only: bool = field(default_factory=lambda: torch.is_deterministic_algorithms_warn_only_enabled())
    fill_uninitialized: bool = field(default_factory=lambda: bool(import_module("torch.utils.deterministic").fill_uninitialized_memory))
    tf32: tuple[str, ...] = field(default_factory=_tf32)  # where it is allowed
    reduced_precision: tuple[str, ...] = field(default_factory=_reduced_precision)  # dtypes whose products may be summed in that dtype
    cudnn_benchmark: bool = field(default_factory=lambda: torch.backends.cudnn.benchmark)
    cudnn_deterministic: bool = field(default_factory=lambda: torch.backends.cudnn.deterministic)
    # Of torch.compile, where it is loaded.
    max_autotune: bool = field(default_factory=lambda: bool(getattr(sys.modules.get("torch._inductor.config"), "max_autotune", False)))
    sdpa: tuple[str, ...] = field(default_factory=_unordered_sdpa)  # enabled backends with an unordered backward
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    started_with: Mapping[str, str] | None = field(default_factory=_started_with)  # None: not known on this system
    modules: frozenset[str] = field(default_factory=lambda: frozenset(name for name, module in sys.modules.items() if module is not None))
    cuda: bool = field(default_factory=lambda: torch.cuda.is_available())
    cuda_initialized: bool = field(default_factory=lambda: torch.cuda.is_initialized())
    # None: no GPU, or not asked because that would initialise CUDA.
    gpu: Gpu | None = field(default_factory=lambda: current_gpu() if torch.cuda.is_initialized() else None)
    cuda_bindings: bool = field(default_factory=lambda: all(map(find_spec, ("cuda", "cuda.bindings"))))
    triton: bool = field(default_factory=lambda: find_spec("triton") is not None)
    kernels: str | None = field(default_factory=lambda: _kernels() if torch.cuda.is_available() else None)  # where ours come from, in words
    torch_version: str = field(default_factory=lambda: torch.__version__)
    world_size: int = field(default_factory=lambda: int(torch.distributed.get_world_size()) if is_distributed() else 1)
