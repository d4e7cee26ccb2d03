"""A compiled kernel, and the file that holds it: in the cache on disk, or in the package."""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ....errors import CompileError
from ...machine_code import machine_code_hash

MAGIC = b"dash-attn-cubin-2\n"


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
