"""Compiles every kernel variant with the NVRTC of this environment and prints what its assembler complains about.

`make test-all` does the same with the newest NVRTC, and CI with some of the variants. PyTorch's builds bring older ones, whose
register allocation differs: `make kernels NVRTC=13.0.88` checks with that one, in an environment of its own.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))

from dash_attn.backends.hopper.driver.compile import compile_uncached, compiler_version
from kernel_variants import VARIANTS, allowed_bytes, assembler_complaints


def main() -> int:
    with ThreadPoolExecutor(2) as pool:
        logs = pool.map(lambda variant: compile_uncached(*variant).log, VARIANTS)
        found = {name: assembler_complaints(log, allowed_bytes(name)) for (_, name), log in zip(VARIANTS, logs, strict=True)}
    complaints = {name: lines for name, lines in found.items() if lines}
    for name, lines in complaints.items():
        print(f"{name}: {lines[0]}")
    print(f"NVRTC {compiler_version()}: {len(complaints)} of {len(VARIANTS)} variants have spills or changed wgmma")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
