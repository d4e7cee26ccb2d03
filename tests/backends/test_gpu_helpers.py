"""What the GPU tests rest on, checked without a GPU: planted faults still fit the kernels, every schedule is tried."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")

from dash_attn.backends.hopper.driver.compile import Kernel, compile_uncached, sources
from dash_attn.scheduling import GENERATORS
from gpu_helpers import hopper, served
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


def names_used(text: str) -> set[tuple[str, str]]:
    """(module of the backend, name in it): also where a name is set, which would otherwise set what nobody reads."""
    found = set(re.findall(r'hopper\("([\w.]+)"\)\.(\w+)', text))
    for kept, module in re.findall(r'(\w+) = hopper\("([\w.]+)"\)\n', text):
        found |= {(module, name) for name in re.findall(rf"\b{kept}\.(\w+)", text)}
    found |= set(re.findall(r'\("((?:calls|driver)\.\w+)", "(\w+)"\)', text))  # of patched_backend
    for name, modules in re.findall(r'\(module, "(\w+)"\).+ for module in \((.+?)\)', text):
        found |= {(module, name) for module in re.findall(r'"([\w.]+)"', modules)}
    return found


def test_gpu_tests_name_what_is_there() -> None:
    used = set[tuple[str, str]]().union(*(names_used(file.read_text()) for file in (Path(__file__).parents[1] / "gpu").glob("*.py")))
    assert len(used) >= 20
    assert {(module, name) for module, name in used if not hasattr(hopper(module), name)} == set()


def test_a_name_that_has_moved_is_found() -> None:
    assert names_used('hopper("calls.backward").MOST_POLLS = 1\n') == {("calls.backward", "MOST_POLLS")}
    assert not hasattr(hopper("calls.backward"), "MOST_POLLS")
    assert names_used('patched_backend({("calls.few_queries", "FEW"): 0})') == {("calls.few_queries", "FEW")}
    assert not hasattr(hopper("calls.few_queries"), "FEW")
    several = 'patched_backend({(module, "sm_count"): few for module in ("calls.forward", "calls.packed")})'
    assert names_used(several) == {("calls.forward", "sm_count"), ("calls.packed", "sm_count")}
