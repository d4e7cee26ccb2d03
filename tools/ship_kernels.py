"""Compiles the kernels that the package carries: tools/build_with_kernels.py runs it. Needs NVRTC and numpy, no GPU and no PyTorch.

They take ten minutes of a processor, so each is kept, in a folder of its compiler beside the other compiled kernels, by its source
(but for comments), options and name: another build compiles only what changed. `--clear` forgets what that compiler made.

Kernels that only measure or compare (recorded task times, unordered sums) are left out, and of those with dropout or ALiBi all but the
usual ones; they are compiled on first use.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "helpers")]


if find_spec("torch") is None:  # these packages import PyTorch in their __init__; what is needed of them does not
    for name in ("dash_attn.backends", "dash_attn.backends.hopper"):
        sys.modules[name] = package = ModuleType(name)
        package.__path__ = [str(ROOT / "src" / name.replace(".", "/"))]

from dash_attn.backends.hopper.driver.compile import (  # noqa: E402
    FOLDER,
    SMALLEST,
    cache_folder,
    compile_kernel,
    compiler_version,
    shipped_file,
    write_kernel,
)
from kernel_variants import MODIFIED, RECORDING, VARIANTS  # noqa: E402

UNORDERED = re.compile(r"attention_backward<\w+, \d+, \d+, false\b")
USUAL = re.compile(r".*, false, MaskKind::(Band|Packed), (true, false|false, true)>")  # dropout or ALiBi, without softcap
SELDOM = {variant for variant in MODIFIED if not USUAL.match(variant[1])}
SHIPPED = [variant for variant in VARIANTS if variant[1] not in RECORDING and not UNORDERED.match(variant[1]) and variant not in SELDOM]


def exact_compiler() -> str:
    """NVRTC itself tells two of the three numbers."""
    told, installed = compiler_version(), metadata.version("nvidia-cuda-nvrtc")
    if not installed.startswith(f"{told}."):
        raise RuntimeError(f"nvidia-cuda-nvrtc {installed} is installed, but the NVRTC that was loaded says {told}")
    return installed


def ship(variants: Sequence[tuple[str, str]], folder: Path) -> int:
    """Into a new folder, from the cache on disk or compiled now. Without logs, which tell times. Returns the bytes in it."""
    if SMALLEST not in variants:
        raise ValueError(f"{SMALLEST} must be shipped: it tells whether a driver loads such kernels")
    compiler = exact_compiler()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for header, name in variants:
        write_kernel(shipped_file(folder, header, name), replace(compile_kernel(header, name), compiler=compiler, log=""))
    return sum(file.stat().st_size for file in folder.iterdir())


def keep_apart(clear: bool) -> Path:
    """Where kernels are kept from now on: names in the usual folder have two numbers of the compiler, and a release has one compiler."""
    folder = cache_folder() / f"shipped-{exact_compiler()}"
    if clear:
        shutil.rmtree(folder, ignore_errors=True)
    os.environ["DASH_ATTN_CACHE"] = str(folder)
    return folder


if __name__ == "__main__":
    print(f"kernels are kept in {keep_apart('--clear' in sys.argv[1:])}")
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:  # NVRTC compiles one kernel at a time in each
        list(pool.map(compile_kernel, *zip(*SHIPPED, strict=True)))
    size = ship(SHIPPED, FOLDER)
    print(f"shipped {len(SHIPPED)} kernels of NVRTC {exact_compiler()}, {size / 2**20:.1f} MiB")
