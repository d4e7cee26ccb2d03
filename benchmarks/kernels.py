"""Kernels that a script needs, compiled into the cache on disk before it runs. It needs no GPU."""

from __future__ import annotations

import re
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor

from dash_attn.backends.hopper.driver.compile import compile_kernel, compiler_version


def compile_ahead(kernels: Iterable[tuple[str, str]]) -> int:
    """(header, name) of each, in as many processes as there are cores. How many spill or are serialised."""
    needed, bad = sorted(set(kernels)), 0
    with ProcessPoolExecutor() as pool:
        for (_, name), kernel in zip(needed, pool.map(compile_kernel, *zip(*needed, strict=True)), strict=True):
            sizes = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", kernel.log)
            spills = any(map(int, sizes)) or "C75" in kernel.log
            bad += spills
            registers = re.search(r"Used (\d+) registers", kernel.log)
            said = f"{registers[1] if registers else '?'} registers, {kernel.sha256[:16]}"
            print(f"{'SPILLS' if spills else 'clean '} {name}: {said}", flush=True)
    print(f"NVRTC {compiler_version()}: {bad} of {len(needed)} kernels spill or are serialised")
    return bad
