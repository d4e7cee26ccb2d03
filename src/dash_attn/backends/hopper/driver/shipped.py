"""Kernels that came with the package, compiled by one NVRTC when it was built (tools/build_with_kernels.py).

They are found by source, options and name, so no compiler has to be installed, and two machines with different PyTorch builds run the
same machine code. A checkout has none, and changed sources find none: both compile.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from .compile import source_key
from .cubin_files import DamagedFile, Kernel, read_kernel

FOLDER = Path(__file__).parents[1] / "shipped"
SMALLEST = ("backward/ending.cuh", "end_trips<64, 64>")  # is there if any is; a driver that loads it loads the others


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
