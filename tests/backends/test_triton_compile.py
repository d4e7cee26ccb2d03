"""Every Triton kernel compiles for every architecture of the table, within its shared memory. No GPU is needed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from dash_attn.backends.machine_code import machine_code_hash
from dash_attn.backends.triton.support import triton_version
from dash_attn.backends.triton.tiles import read_table
from dash_attn.libraries import numbers
from needs_triton import needs_triton
from triton_compiling import SHARED_MEMORY, Compiled, PretendedDriver, said_by_ptxas, target_of

NVIDIA = [name for name in SHARED_MEMORY if not name.startswith("gfx")]
# Each architecture and each kernel at least once; `make test-all` compiles the rest.
QUICK = [
    ("8.0", "forward", Compiled("8.0", (64, 64))),
    ("8.6", "key gradients", Compiled("8.6", (64, 64))),
    ("8.9", "query gradients", Compiled("8.9", (64, 64))),
    ("9.0", "key gradients", Compiled("9.0", (64, 64), group=4)),
    ("10.0", "query gradients", Compiled("10.0", (64, 64))),
    ("12.0", "key gradients", Compiled("12.0", (64, 64), kind="packed")),
    ("9.0", "key gradients", Compiled("9.0", (64, 64), kind="bits")),
]
ALL = [
    *(Compiled(name, (dim, dim), dtype) for name in SHARED_MEMORY for dim in (64, 128, 256) for dtype in (torch.bfloat16, torch.float32)),
    *(Compiled(name, kind=kind, softcap=20.0, group=4) for name in NVIDIA for kind in ("rows", "blocks", "packed", "bits")),
    *(Compiled("9.0", dims, torch.float16) for dims in ((192, 128), (24, 40), (64, 256))),
]

SERIALISED = "wgmma.mma_async instructions are serialized"

pytestmark = needs_triton


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled anew, whatever was compiled before."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def check(case: Compiled, name: str) -> None:
    launches = case.launches()
    launch = launches[name if name in launches else "gradients"]  # where the table has both passes in one launch
    compiled = launch.compile(target_of(case.architecture))
    assert compiled.metadata.shared <= SHARED_MEMORY[case.architecture], f"{case} {name} ({launch.tile}): {compiled.metadata.shared} bytes"
    if "cubin" in compiled.asm:
        assert len(machine_code_hash(compiled.asm["cubin"])) == 64


@pytest.mark.parametrize(("architecture", "name", "case"), QUICK, ids=[f"{name}-{case}" for _, name, case in QUICK])
def test_kernels_compile_within_shared_memory(architecture: str, name: str, case: Compiled) -> None:
    assert case.architecture == architecture
    check(case, name)


@pytest.mark.parametrize("serialised", [False, True])
def test_products_of_hopper_kernels_run_side_by_side(serialised: bool) -> None:
    """A loop over partial tiles that has one stage makes ptxas serialise the products of all loops: the control, up to Triton 3.8."""
    launch = Compiled("9.0", (64, 64)).launches()["forward"]
    if serialised:
        launch = replace(launch, constants={**launch.constants, "PARTIAL_STAGES": 1})
    expected = serialised and numbers(triton_version()) < (3, 9)
    assert (SERIALISED in said_by_ptxas(launch.compile(target_of("9.0")), "9.0")) == expected


def test_small_kernels_compile() -> None:
    launches = Compiled("8.0", kind="packed").launches()
    for name in ("row statistics", "offsets"):
        assert launches[name].compile(target_of("8.0")).metadata.shared <= SHARED_MEMORY["8.0"]


def test_wrong_offsets_stop_the_device() -> None:
    """The check is compiled with its assertions, which Triton leaves out otherwise."""
    launch = Compiled("8.0", kind="packed").launches()["offsets"]
    assert "assert" in launch.compile(target_of("8.0")).asm["ptx"]


@pytest.mark.parametrize("name", ["row statistics", pytest.param("query gradients", marks=pytest.mark.exhaustive)])
def test_what_is_compiled_here_is_what_a_call_runs(name: str) -> None:
    """A call compiles by its arguments, this file by a signature that it writes down. `explain` hashes the former."""
    from triton.runtime import driver

    launch = Compiled("9.0", (64, 64), kind="rows").launches()[name]
    written = machine_code_hash(launch.compile(target_of("9.0")).asm["cubin"])
    active = "_active" if hasattr(driver, "_active") else "active"  # from Triton 3.5 on, and before
    with patch.object(driver, active, PretendedDriver("9.0")), patch.dict(os.environ):
        launch.function.device_caches.clear()
        os.environ["TRITON_CACHE_DIR"] += "/called"  # nothing is found that was compiled above
        called = launch.machine_code()
        launch.function.device_caches.clear()
    assert called == written
    other = Compiled("9.0", (64, 64), torch.float16, "rows").launches()[name].compile(target_of("9.0"))
    assert machine_code_hash(other.asm["cubin"]) != written, "the control: another dtype has other machine code"


def test_every_architecture_of_the_table_has_a_limit() -> None:
    assert set(read_table()["16 bits"]) == set(SHARED_MEMORY)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ALL, ids=str)
def test_every_kernel_compiles_within_shared_memory(case: Compiled) -> None:
    for name in case.launches():
        check(case, name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_no_kernel_of_the_table_waits_for_each_product(dim: int) -> None:
    for name, launch in Compiled("9.0", (dim, dim)).launches().items():
        assert SERIALISED not in said_by_ptxas(launch.compile(target_of("9.0")), "9.0"), name
