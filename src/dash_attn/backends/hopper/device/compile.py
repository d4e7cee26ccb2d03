"""NVRTC: kernel sources in the package -> cubin, cached on disk by source, options and compiler version.

Needs no GPU and no CUDA toolkit: `nvidia-cuda-nvrtc` and `cuda-bindings` come with torch's CUDA builds (or from PyPI).
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from ...machine_code import machine_code_hash
from .. import kernels
from . import shared_header
from .wgmma_header import wgmma_header

OPTIONS = ("--gpu-architecture=sm_90a", "-std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v")
MAGIC = b"dash-attn-cubin-1\n"


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel: its binary, the mangled name inside it and what the assembler said."""

    cubin: bytes
    symbol: str
    log: str

    @property
    def sha256(self) -> str:
        """Names the machine code: part of what decides the bits."""
        return machine_code_hash(self.cubin)


class CompileError(RuntimeError):
    """NVRTC refused a kernel; the message holds its log."""


@cache
def sources() -> dict[str, str]:
    """Every kernel file of the package by room and name, and the generated ones."""
    rooms = [room for room in resources.files(kernels).iterdir() if room.is_dir()]
    files = {f"{room.name}/{file.name}": file.read_text() for room in rooms for file in room.iterdir() if file.name.endswith(".cuh")}
    return {**files, "common/wgmma.cuh": wgmma_header(), shared_header.NAME: shared_header.shared_header()}


def compile_kernel(header: str, name: str) -> Kernel:
    """The kernel `name` (a C++ name expression) of `header`, from the cache or compiled now."""
    key = _key(header, name)
    path = cache_folder() / f"{key}.cubin"
    kernel = _read(path)
    if kernel is None:
        print(f"dash-attn: compiling {name} for sm_90a (once; kept in {path.parent})", file=sys.stderr, flush=True)
        kernel = compile_uncached(header, name)
        _write(path, kernel)
    return kernel


def compile_uncached(header: str, name: str, extra: dict[str, str] | None = None) -> Kernel:
    """Compile now. `extra` replaces or adds sources (tests plant faults with it)."""
    files = {**sources(), **(extra or {})}
    nvrtc = _nvrtc()
    names = [n.encode() for n in files]
    program = _check(
        nvrtc.nvrtcCreateProgram(f'#include "{header}"\n'.encode(), b"kernel.cu", len(files), [t.encode() for t in files.values()], names)
    )
    _check(nvrtc.nvrtcAddNameExpression(program, name.encode()))
    options = [o.encode() for o in OPTIONS]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC could not compile {name}:\n{log}")
    symbol = _check(nvrtc.nvrtcGetLoweredName(program, name.encode())).decode()
    cubin = b" " * _check(nvrtc.nvrtcGetCUBINSize(program))
    _check(nvrtc.nvrtcGetCUBIN(program, cubin))
    nvrtc.nvrtcDestroyProgram(program)
    return Kernel(cubin, symbol, log)


def cache_folder() -> Path:
    """DASH_ATTN_CACHE, or the user's cache folder."""
    chosen = os.environ.get("DASH_ATTN_CACHE")
    base = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dash-attn"
    base.mkdir(parents=True, exist_ok=True)
    return base


@cache
def compiler_version() -> str:
    major, minor = _check(_nvrtc().nvrtcVersion())
    return f"{major}.{minor}"


@cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise ImportError("the Hopper backend needs cuda-bindings and NVRTC: pip install 'dash-attn[gpu]'") from error
    return nvrtc


@cache
def _key(header: str, name: str) -> str:
    digest = hashlib.sha256()
    for part in (header, name, *OPTIONS, compiler_version(), *(f"{n}\0{t}" for n, t in sorted(sources().items()))):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:40]


def _write(path: Path, kernel: Kernel) -> None:
    """Write aside, then rename: a process that starts at the same time sees the whole file or none."""
    payload = b"\0".join([kernel.symbol.encode(), kernel.log.encode(), kernel.cubin])
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, suffix=".tmp", delete=False) as file:
        file.write(MAGIC + hashlib.sha256(payload).digest() + payload)
    os.replace(file.name, path)


def _read(path: Path) -> Kernel | None:
    """The cached kernel, or None when there is none or it is damaged (it is then rebuilt)."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    head, checksum, payload = data[: len(MAGIC)], data[len(MAGIC) : len(MAGIC) + 32], data[len(MAGIC) + 32 :]
    if head != MAGIC or hashlib.sha256(payload).digest() != checksum:
        print(f"dash-attn: rebuilding damaged cache entry {path}", file=sys.stderr)
        return None
    symbol, log, cubin = payload.split(b"\0", 2)
    return Kernel(cubin, symbol.decode(), log.decode())


def _check(result: Sequence[Any]) -> Any:
    status, *values = result
    if int(status) != 0:
        raise CompileError(f"NVRTC: {status}")
    return values[0] if len(values) == 1 else tuple(values)


def _text(size_of: Any, read: Any, program: Any) -> str:
    buffer: bytes = b" " * _check(size_of(program))
    _check(read(program, buffer))
    return buffer.rstrip(b"\0 ").decode()
