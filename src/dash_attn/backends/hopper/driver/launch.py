"""The few driver calls the backend makes: load a kernel on a device, launch it on a stream."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch

from .compile import SMALLEST, Kernel, compile_kernel, compiler_version, origin, shipped_compiler, shipped_kernel

ANY_DEVICE = -1  # of tensors on the meta device, which only ask what a call would do
CANNOT_LOAD = {"CUDA_ERROR_INVALID_IMAGE", "CUDA_ERROR_NO_BINARY_FOR_GPU", "CUDA_ERROR_INVALID_SOURCE", "CUDA_ERROR_NOT_SUPPORTED"}
origins: dict[str, str] = {}  # of every kernel that was loaded
_NO_SWITCH: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel on one device."""

    function: Any
    threads: int
    shared_bytes: int
    kernel: Kernel

    def prepare(self, grid: int, addresses: Sequence[int], cooperative: bool = False, early: bool = False) -> Launch:
        return Launch(self, grid, addresses, cooperative, early)


class Launch:
    """A kernel with its grid and the addresses of its arguments, which are copied at each launch: whoever holds the values may
    change them between launches.

    cooperative: all blocks are resident together, or it is an error. early: blocks may start once the kernel before it in the
    stream allows it (allow_next_kernel in common/ptx.cuh) and then have to know what to wait for.
    """

    def __init__(self, kernel: LoadedKernel, grid: int, addresses: Sequence[int], cooperative: bool, early: bool) -> None:
        driver = cuda_driver()
        self._function = kernel.function
        self._pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        self._address = ctypes.addressof(self._pointers)
        self._stream: Any = None
        self._config = config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = kernel.threads, 1, 1
        config.sharedMemBytes = kernel.shared_bytes
        names = driver.CUlaunchAttributeID
        attributes = []
        if cooperative:
            attributes.append(_attribute(names.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, "cooperative"))
        if early:
            attributes.append(
                _attribute(names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, "programmaticStreamSerializationAllowed")
            )
        config.attrs, config.numAttrs = attributes, len(attributes)

    def on(self, stream: Any) -> None:
        """Asynchronous. One thread at a time."""
        if stream is not self._stream:
            self._config.hStream = self._stream = stream
        check(cuda_driver().cuLaunchKernelEx(self._config, self._function, self._address, 0))


def _attribute(name: Any, field: str) -> Any:
    attribute = cuda_driver().CUlaunchAttribute()
    attribute.id = name
    setattr(attribute.value, field, 1)
    return attribute


@cache
def load_kernel(device: int, header: str, name: str, threads: int, shared_bytes: int) -> LoadedKernel:
    """Take from the package (or the cache on disk, or compile) and load a kernel on a device. A kernel is loaded once per device."""
    kernel = (shipped_kernel(header, name) if takes_shipped(device) else None) or compile_kernel(header, name)
    driver = cuda_driver()
    with on_device(device):
        module = check(driver.cuModuleLoadData(kernel.cubin))
        function = check(driver.cuModuleGetFunction(module, kernel.symbol.encode()))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
    origins[name] = kernel.origin
    return LoadedKernel(function, threads, shared_bytes, kernel)


@cache
def takes_shipped(device: int) -> bool:
    """Whether a device runs the kernels that came with the package: all that there are, or none, so that ranks can compare."""
    smallest = shipped_kernel(*SMALLEST)
    if smallest is None:
        return False
    driver = cuda_driver()
    with on_device(device):
        result = driver.cuModuleLoadData(smallest.cubin)
        if result[0].name in CANNOT_LOAD:
            print(f"dash-attn: this driver cannot load kernels of NVRTC {smallest.compiler}; they are compiled here", file=sys.stderr)
            return False
        check(driver.cuModuleUnload(check(result)))
    return True


def usual_origin() -> str:
    """Of the kernels that the current device runs, but for a few that never come with the package. Before CUDA is used: as if they load."""
    shipped = shipped_compiler()
    if shipped is not None and (not torch.cuda.is_initialized() or takes_shipped(torch.cuda.current_device())):
        return origin(shipped, shipped=True)
    return origin(compiler_version(), shipped=False)


def device_index(device: torch.device) -> int:
    if device.type == "meta":
        return ANY_DEVICE
    return torch.cuda.current_device() if device.index is None else device.index


@contextmanager
def _switched_to(index: int) -> Iterator[None]:
    with torch.cuda.device(index):
        _make_context_current(index)
        yield


def on_device(index: int) -> AbstractContextManager[None]:
    """Makes the device and its context current for driver calls; costs little if they already are."""
    if torch.cuda.current_device() != index:
        return _switched_to(index)
    if getattr(_thread, "device", None) != index:
        _make_context_current(index)
    return _NO_SWITCH


_thread = threading.local()


def _make_context_current(index: int) -> None:
    """torch and the CUDA runtime do so lazily: a thread that has made no runtime call yet (autograd's) has no context.
    Once it has one, torch changes it whenever it changes the current device."""
    driver = cuda_driver()
    context = _primary_context(index)
    if int(check(driver.cuCtxGetCurrent())) != int(context):
        check(driver.cuCtxSetCurrent(context))
    _thread.device = index


@cache
def _primary_context(index: int) -> Any:
    driver = cuda_driver()
    torch.cuda.init()
    return check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(index))))


def current_stream(index: int) -> Any:
    """torch's current stream on a device, as the driver wants it."""
    return _stream_object(torch._C._cuda_getCurrentRawStream(index))


@lru_cache(maxsize=1024)
def _stream_object(stream: int) -> Any:
    return cuda_driver().CUstream(stream)


@cache
def cuda_driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ImportError("the Hopper backend needs cuda-bindings: pip install 'dash-attn[gpu]'") from error
    return driver


def check(result: Sequence[Any]) -> Any:
    """The value of a driver call, or an error with the driver's own words."""
    status, *values = result
    if status:
        _, text = cuda_driver().cuGetErrorString(status)
        raise RuntimeError(f"CUDA driver: {status.name}: {text.decode() if text else 'no description'}")
    return values[0] if len(values) == 1 else tuple(values)
