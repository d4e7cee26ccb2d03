"""What the GPU tests rest on, checked without a GPU: planted faults still fit the kernels, every schedule is tried."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")

from dash_attn.backends.hopper.driver.compile import Kernel, compile_uncached, sources
from dash_attn.scheduling import GENERATORS
from gpu_helpers import served
from planted_faults import FAULTS, FILE, plant

NAME = "attention_backward<bf16, 128, 128, true, false, MaskKind::Band>"


@pytest.fixture(scope="module")
def healthy() -> Kernel:
    return compile_uncached("backward/attention.cuh", NAME)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_compiles_to_other_code(fault: str, healthy: Kernel) -> None:
    faulty = compile_uncached("backward/attention.cuh", NAME, plant(fault, sources()))
    assert faulty.sha256 != healthy.sha256


def test_a_fault_that_no_longer_fits_is_an_error() -> None:
    with pytest.raises(AssertionError, match="has changed"):
        plant("nobody waits", {**sources(), FILE: "// nothing here"})


def test_every_schedule_is_tried() -> None:
    assert {name for name, _ in served()} == set(GENERATORS)
