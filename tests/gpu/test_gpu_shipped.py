"""Kernels that came with the package, on the driver at hand: it loads them, or all are compiled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dash_attn import Causal, explain, flash_attn_func
from dash_attn.call.explain import Explanation
from dense import assert_same_bits, run_ours
from gpu_helpers import gpu_inputs, hopper, patched_backend
from readme_call import readme_kernels

pytestmark = pytest.mark.gpu
ARCHITECTURE = 49  # the byte of a cubin that names it


def fill(folder: Path, broken: bool) -> None:
    """With the kernels of README's call, as another compiler would have made them. broken: for another architecture."""
    compiling = hopper("driver.compile")
    for header, name in [compiling.SMALLEST, *((kernel.header, kernel.name) for kernel in readme_kernels())]:
        kernel = compiling.compile_kernel(header, name)
        assert kernel.cubin[ARCHITECTURE] == 90
        cubin = kernel.cubin[:ARCHITECTURE] + bytes([80]) + kernel.cubin[ARCHITECTURE + 1 :] if broken else kernel.cubin
        compiling.write_kernel(compiling.shipped_file(folder, header, name), replace(kernel, cubin=cubin, compiler="99.1.2"))


def told() -> Explanation:
    q, k, v, _ = gpu_inputs(1024, 1024, (8, 2), dim=64)
    return explain(flash_attn_func, q, k, v, causal=True)


@pytest.mark.parametrize("broken", [False, True], ids=["loads", "does not load"])
def test_they_run_if_the_driver_loads_them(tmp_path: Path, broken: bool, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = gpu_inputs(1024, 1024, (8, 2), dim=64)
    with patched_backend({("driver.compile", "FOLDER"): Path("/nowhere")}):
        expected, compiled = run_ours(inputs, Causal()), told()
    fill(tmp_path, broken)
    with patched_backend({("driver.compile", "FOLDER"): tmp_path}):
        found, explained = run_ours(inputs, Causal()), told()
    assert_same_bits(found, expected)
    assert explained.kernels == compiled.kernels
    assert explained.kernel_origins == (compiled.kernel_origins if broken else dict.fromkeys(compiled.kernels, "shipped, NVRTC 99.1.2"))
    assert all(origin.startswith("compiled here") for origin in compiled.kernel_origins.values())
    assert capsys.readouterr().err.count("this driver cannot load kernels of NVRTC 99.1.2") == broken
