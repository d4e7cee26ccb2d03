"""Every kernel variant compiles for sm_90a, without a GPU: no spills, no serialised wgmma, parameters laid out as Python says."""

from __future__ import annotations

import ctypes
import re

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")

from importlib import import_module

from dash_attn.backends.hopper import structs
from dash_attn.backends.hopper.compile import CompileError, compile_uncached

BACKWARD_LAUNCH = import_module("dash_attn.backends.hopper.backward")
FORWARD_LAUNCH = import_module("dash_attn.backends.hopper.forward")
CONSUMER_CHOICES = FORWARD_LAUNCH.CONSUMER_CHOICES
Q_ROWS = BACKWARD_LAUNCH.Q_ROWS

DTYPES = ("bf16", "f16")
DIMS = (64, 128)
BACKWARD = [
    f"attention_backward<{dtype}, {dim}, {Q_ROWS[dim]}, {ordered}, MaskKind::{mask}>"
    for dtype in DTYPES
    for dim in DIMS
    for ordered in ("true", "false")
    for mask in ("Band", "Rows", "Blocks")
]
FORWARD = [
    f"attention_forward<{dtype}, {dim}, {consumers}, MaskKind::{mask}>"
    for dtype in DTYPES
    for dim in DIMS
    for consumers in CONSUMER_CHOICES[dim]
    for mask in ("Band", "Rows", "Blocks")
]
VARIANTS = [
    *(("backward.cuh", name) for name in BACKWARD),
    *(("forward.cuh", name) for name in FORWARD),
    *(("preprocess.cuh", f"backward_preprocess<{dtype}, {dim}>") for dtype in DTYPES for dim in DIMS),
    *(("postprocess.cuh", f"backward_postprocess<{dtype}, {dim}, {Q_ROWS[dim]}>") for dtype in DTYPES for dim in DIMS),
]


def assembler_complaints(log: str) -> list[str]:
    """Spills, local memory, and the C75xx warnings with which ptxas says that it serialised wgmma or ignored setmaxnreg."""
    bad = []
    for line in log.splitlines():
        sizes = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", line)
        if any(int(size) for size in sizes) or "C75" in line or "warning" in line.lower():
            bad.append(line.strip())
    return bad


@pytest.mark.parametrize(("header", "name"), VARIANTS, ids=[name for _, name in VARIANTS])
def test_variant_compiles_clean(header: str, name: str) -> None:
    kernel = compile_uncached(header, name)
    assert "registers" in kernel.log, "the assembler's report is missing, so spills would go unseen"
    assert assembler_complaints(kernel.log) == []


def test_spills_would_be_seen() -> None:
    """The control: a kernel that must spill is reported."""
    source = """
    __global__ void __launch_bounds__(1024) spill(float* x) {
      float r[256];
      #pragma unroll
      for (int i = 0; i < 256; i++) r[i] = x[i * 1024 + threadIdx.x];
      __syncthreads();
      #pragma unroll
      for (int i = 0; i < 256; i++) x[i * 1024 + threadIdx.x] = r[255 - i] * r[i];
    }
    """
    assert assembler_complaints(compile_uncached("spill.cuh", "spill", {"spill.cuh": source}).log)


LAYOUTS = {
    "backward.cuh": (structs.PlanTables, structs.MaskParams, structs.BackwardParams),
    "preprocess.cuh": (structs.PreprocessParams,),
    "postprocess.cuh": (structs.PostprocessParams,),
    "forward.cuh": (structs.ForwardParams,),
}


@pytest.mark.parametrize("header", LAYOUTS)
def test_parameter_layouts(header: str) -> None:
    checks = []
    for struct in LAYOUTS[header]:
        name = struct.__name__
        checks.append(f"static_assert(sizeof({name}) == {ctypes.sizeof(struct)});")
        for field, *_ in struct._fields_:
            checks.append(f"static_assert(__builtin_offsetof({name}, {field}) == {getattr(struct, field).offset});")
    source = f'#include "{header}"\n' + "\n".join(checks) + "\n__global__ void nothing() {}\n"
    assert compile_uncached("layout.cuh", "nothing", {"layout.cuh": source}).cubin


def test_wrong_layout_would_be_seen() -> None:
    source = '#include "mask.cuh"\nstatic_assert(sizeof(MaskParams) == 1);\n__global__ void nothing() {}\n'
    with pytest.raises(CompileError, match="static assertion"):
        compile_uncached("layout.cuh", "nothing", {"layout.cuh": source})


SIZES = [
    *(("backward.cuh", f"BackwardConfig<{d}, {Q_ROWS[d]}>", BACKWARD_LAUNCH.shared_bytes(d)) for d in DIMS),
    *(("forward.cuh", f"ForwardConfig<{d}, {c}>", FORWARD_LAUNCH.shared_bytes(d, c)) for d in DIMS for c in CONSUMER_CHOICES[d]),
]


@pytest.mark.parametrize(("header", "config", "size"), SIZES)
def test_shared_memory_size(header: str, config: str, size: int) -> None:
    source = f'#include "{header}"\nstatic_assert({config}::SHARED_BYTES == {size});\n__global__ void nothing() {{}}\n'
    assert compile_uncached("size.cuh", "nothing", {"size.cuh": source}).cubin
