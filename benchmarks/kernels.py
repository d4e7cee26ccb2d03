"""Compiles kernels and tells of spills; needs no GPU. As a script (`make kernels`), every variant with the NVRTC of this environment.

`make test-all` does the same with the newest NVRTC, and CI with some of the variants. PyTorch's builds bring older ones, whose
register allocation differs: `make kernels NVRTC=13.0.88` checks with that one, in an environment of its own.

`python -m benchmarks.kernels ranks decode` compiles, into the cache on disk, what those scripts will load.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from dash_attn.backends.hopper.driver.compile import compile_kernel, compile_uncached, compiler_version
from kernel_variants import VARIANTS, allowed_bytes, assembler_complaints

NEEDED = {  # by script: header and name
    "decode": r"decode/.*|forward/\S+ attention_forward<.*MaskKind::Band.*",  # of caches, and of the forward that --check compares with
    "ranks": r"\S+ attention_(forward<\w+, \d+, \d|backward<\w+, \d+, \d+, true|backward_of_legs<.*, \d+), false, MaskKind::Band(, \d+)?>"
    r"|\S+ (end_trips<.*|(backward_preprocess|backward_postprocess|sink_gradient)<.*, false)>",  # of plain calls and of ranks
}


def needed_by(script: str) -> set[tuple[str, str]]:
    return {variant for variant in VARIANTS if re.fullmatch(NEEDED[script], " ".join(variant))}


def compile_ahead(kernels: Iterable[tuple[str, str]], allowed: Callable[[str], int] = lambda name: 0, cached: bool = True) -> int:
    """(header, name) of each, in as many processes as there are cores, by default into the cache on disk. How many spill more bytes than
    allowed, or are serialised."""
    needed, bad = sorted(set(kernels)), 0
    make: Callable[[str, str], Any] = compile_kernel if cached else compile_uncached
    with ProcessPoolExecutor() as pool:
        for (_, name), kernel in zip(needed, pool.map(make, *zip(*needed, strict=True)), strict=True):
            complaints = assembler_complaints(kernel.log, allowed(name))
            bad += bool(complaints)
            registers = re.search(r"Used (\d+) registers", kernel.log)
            said = f"{registers[1] if registers else '?'} registers, {kernel.sha256[:16]}"
            print(f"{'SPILLS' if complaints else 'clean '} {name}: {said}", *complaints[:1], flush=True)
    print(f"NVRTC {compiler_version()}: {bad} of {len(needed)} kernels spill or are serialised")
    return bad


if __name__ == "__main__":
    if unknown := set(sys.argv[1:]) - set(NEEDED):
        sys.exit(f"no such script: {', '.join(unknown)}; choose from {', '.join(NEEDED)}")
    some = set[tuple[str, str]]().union(*map(needed_by, sys.argv[1:]))
    sys.exit((compile_ahead(some) if some else compile_ahead(VARIANTS, allowed_bytes, cached=False)) > 0)
