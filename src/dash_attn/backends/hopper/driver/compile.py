"""Kernel sources in the package -> cubin: shipped with it, or by NVRTC, cached on disk by source, options and compiler version.

Shipped kernels were compiled by one NVRTC when the package was built (tools/build_with_kernels.py). They are found by source, options and
name, so no compiler has to be installed, and two machines with different PyTorch builds run the same machine code. A checkout has none,
and changed sources find none: both compile.
That needs no GPU and no CUDA toolkit: `nvidia-cuda-nvrtc` and `cuda-bindings` come with torch's CUDA builds (or from PyPI).
"""

import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from ....errors import CompileError
from ...machine_code import machine_code_hash
from .. import kernels
from . import bit_sums_header, shared_header
from .wgmma_header import wgmma_header

FOLDER = Path(__file__).parents[1] / "shipped"
SMALLEST = ("backward/ending.cuh", "end_trips<64, 64>")  # is shipped if any is; a driver that loads it loads the others
OPTIONS = ("--gpu-architecture=sm_90a", "-std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v")
MAGIC = b"dash-attn-cubin-2\n"  # a file that holds a kernel begins with it


@dataclass(frozen=True)
class Kernel:
    """Its binary, the mangled name inside it, what the assembler said, and the version of the NVRTC that made it."""

    cubin: bytes
    symbol: str
    log: str
    compiler: str
    shipped: bool = False  # it came with the package

    @property
    def sha256(self) -> str:
        """Names the machine code: part of what decides the bits."""
        return machine_code_hash(self.cubin)

    @property
    def origin(self) -> str:
        return origin(self.compiler, self.shipped)


class DamagedFile(CompileError):
    """A file that is not as it was written."""


@cache
def sources() -> dict[str, str]:
    """Every kernel file of the package by room and name, and the generated ones."""
    rooms = [room for room in resources.files(kernels).iterdir() if room.is_dir()]
    files = {f"{room.name}/{file.name}": file.read_text() for room in rooms for file in room.iterdir() if file.name.endswith(".cuh")}
    generated = {shared_header.NAME: shared_header.shared_header(), bit_sums_header.NAME: bit_sums_header.bit_sums_header()}
    return {**files, **generated, "common/wgmma.cuh": wgmma_header()}


def included_by(header: str, files: dict[str, str]) -> dict[str, str]:
    """A file, and those that it includes, directly or not."""
    found: dict[str, str] = {}
    left = [header]
    while left:
        name = left.pop()
        if name not in found:
            found[name] = files[name]
            left += re.findall(r'^#include "(.+)"$', files[name], re.MULTILINE)
    return found


def shipped_kernel(header: str, name: str) -> Kernel | None:
    """None where it did not come with the package. A damaged one raises: compiling it here would change bits in silence."""
    try:
        kernel = read_kernel(shipped_file(FOLDER, header, name))
    except DamagedFile as error:
        raise DamagedFile(f"{error}, the kernel {name} that came with dash-attn; install the package again") from None
    return None if kernel is None else replace(kernel, shipped=True)


def shipped_file(folder: Path, header: str, name: str) -> Path:
    return folder / f"{source_key(header, name)}.cubin"


def shipped_compiler() -> str | None:
    """The NVRTC that made them; None where there are none."""
    kernel = shipped_kernel(*SMALLEST)
    return None if kernel is None else kernel.compiler


def compile_kernel(header: str, name: str) -> Kernel:
    """The kernel `name` (a C++ name expression) of `header`, from the cache or compiled now."""
    path = cache_folder() / f"{source_key(header, name)}-nvrtc-{compiler_version()}.cubin"
    kernel = _read_cache(path)
    if kernel is None:
        print(f"dash-attn: compiling {name} for sm_90a (once; kept in {path.parent})", file=sys.stderr, flush=True)
        kernel = compile_uncached(header, name)
        write_kernel(path, kernel)
    return kernel


def compile_uncached(header: str, name: str, extra: dict[str, str] | None = None) -> Kernel:
    """Compile now. `extra` replaces or adds sources (tests plant faults with it)."""
    files = included_by(header, {**sources(), **(extra or {})})
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
    return Kernel(cubin, symbol, log, compiler_version())


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


def compiler_at_hand() -> str | None:
    """Its version, None without one: kernels that came with the package need none."""
    try:
        return compiler_version()
    except ImportError:
        return None


@cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # loads the library, which is a package of its own
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            "compiling a kernel that did not come with the package needs cuda-bindings and NVRTC:"
            " pip install 'dash-attn[gpu]' nvidia-cuda-nvrtc"
        ) from error
    return nvrtc


@cache
def source_key(header: str, name: str) -> str:
    """Names a kernel by all that matters to a compiler, so that a change elsewhere, or of words, compiles nothing again."""
    digest = hashlib.sha256()
    for part in (header, name, *OPTIONS, *(f"{n}\0{code_of(t)}" for n, t in sorted(included_by(header, sources()).items()))):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:40]


def code_of(text: str) -> str:
    """A source without comments and indentation."""
    lines = (line.partition("//")[0].strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line)


def _read_cache(path: Path) -> Kernel | None:
    try:
        return read_kernel(path)
    except DamagedFile as error:
        print(f"dash-attn: {error}; compiling it again", file=sys.stderr)
        return None


def _check(result: Sequence[Any]) -> Any:
    status, *values = result
    if int(status) != 0:
        raise CompileError(f"NVRTC: {status}")
    return values[0] if len(values) == 1 else tuple(values)


def _text(size_of: Any, read: Any, program: Any) -> str:
    buffer: bytes = b" " * _check(size_of(program))
    _check(read(program, buffer))
    return buffer.rstrip(b"\0 ").decode()


def origin(compiler: str, shipped: bool) -> str:
    return f"{'shipped' if shipped else 'compiled here'}, NVRTC {compiler}"


def write_kernel(path: Path, kernel: Kernel) -> None:
    """Write aside, then rename: a process that starts at the same time sees the whole file or none."""
    payload = b"\0".join([kernel.symbol.encode(), kernel.compiler.encode(), kernel.log.encode(), kernel.cubin])
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, suffix=".tmp", delete=False) as file:
        file.write(MAGIC + hashlib.sha256(payload).digest() + payload)
    os.replace(file.name, path)


def read_kernel(path: Path) -> Kernel | None:
    """The kernel of a file, or None when there is none."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    head, checksum, payload = data[: len(MAGIC)], data[len(MAGIC) : len(MAGIC) + 32], data[len(MAGIC) + 32 :]
    if head != MAGIC or hashlib.sha256(payload).digest() != checksum:
        raise DamagedFile(f"{path} is damaged")
    symbol, compiler, log, cubin = payload.split(b"\0", 3)
    return Kernel(cubin, symbol.decode(), log.decode(), compiler.decode())
