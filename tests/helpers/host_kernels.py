"""Kernels without PTX, compiled for the host with g++: tests/backends/device_on_host has what they need of CUDA."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

from compilers import needs_gxx
from dash_attn.backends.hopper.driver.compile import sources

ON_HOST = Path(__file__).parents[1] / "backends" / "device_on_host"


def write_sources(folder: Path, names: tuple[str, ...], replaced: tuple[str, str] = ("", "")) -> None:
    """Sources of the package, with one text replaced by another."""
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(sources()[name].replace(*replaced) if replaced[0] else sources()[name])


def host_library(folder: Path, source: str) -> ctypes.CDLL:
    """`source` of device_on_host, compiled in a folder that has the kernels' sources."""
    compiler = needs_gxx()
    for name in (source, "fibers.h"):
        shutil.copy(ON_HOST / name, folder / name)
    command = [compiler, "-I.", "-std=c++17", "-O1", "-shared", "-fPIC", "-include", str(ON_HOST / "shim.h")]
    subprocess.run([*command, source, "-o", "library.so"], cwd=folder, check=True, capture_output=True, text=True)
    return ctypes.CDLL(str(folder / "library.so"))
