"""The scripts under benchmarks/ that compile kernels ahead ask for kernels that exist."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kernel_variants import VARIANTS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    name = f"benchmark_{request.param}"
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{request.param}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("script", ["decode"], indirect=True)
def test_kernels_of_decode(script: ModuleType) -> None:
    needed = {(kernel.header, kernel.name) for kernel in script.needed_kernels()}
    assert needed <= set(VARIANTS)
    assert ("forward/attention.cuh", "attention_forward<bf16, 192, 2, false, MaskKind::Band, 128>") in needed


@pytest.mark.parametrize("script", ["devices"], indirect=True)
def test_kernels_of_devices(script: ModuleType) -> None:
    needed = set.union(*map(script.kernels_of, script.timed_cases()))
    assert needed
    assert needed <= set(VARIANTS)
