"""Every kernel variant compiles for sm_90a, without a GPU: no spills, no serialised wgmma, parameters laid out as Python says."""

from __future__ import annotations

import ctypes

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")

from importlib import import_module

from dash_attn.backends.hopper import tiles as shapes
from dash_attn.backends.hopper.device import parameters as structs
from dash_attn.backends.hopper.device.compile import CompileError, compile_uncached
from dash_attn.scheduling.generators.auto import FEW_KV_TILES
from dash_attn.scheduling.schedule import MANY_KV_TILES
from kernel_variants import DIMS, VARIANTS, assembler_complaints

alternating = import_module("dash_attn.scheduling.generators.alternating")
CONSUMER_CHOICES = import_module("dash_attn.backends.hopper.calls.forward").CONSUMER_CHOICES
threads_per_row = import_module("dash_attn.backends.hopper.calls.backward").threads_per_row

packed = import_module("dash_attn.backends.hopper.calls.packed")
PACKED_BYTES = {
    "Sequence": packed.SEQUENCE_BYTES,
    "SequenceParts": packed.PARTS_BYTES,
    "PackedChain": packed.CHAIN_BYTES,
    "PackedTile": packed.TILE_BYTES,
    "Ticket": import_module("dash_attn.backends.hopper.calls.backward").TICKET_BYTES,
}


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
    "backward/attention.cuh": (structs.PlanTables, structs.MaskParams, structs.BackwardParams),
    "backward/preprocess.cuh": (structs.TilePlaces, structs.PreprocessParams),
    "backward/sink_gradient.cuh": (structs.SinkGradientParams,),
    "device_planning/chains.cuh": (structs.PackedParams,),
    "device_planning/forward_tiles.cuh": (structs.PackedTilesParams,),
    "backward/postprocess.cuh": (structs.PostprocessParams,),
    "forward/attention.cuh": (structs.ForwardParams,),
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
    source = '#include "common/mask.cuh"\nstatic_assert(sizeof(MaskParams) == 1);\n__global__ void nothing() {}\n'
    with pytest.raises(CompileError, match="static assertion"):
        compile_uncached("layout.cuh", "nothing", {"layout.cuh": source})


SIZES = [
    *(("backward/attention.cuh", f"BackwardConfig<{d}>::SHARED_BYTES", shapes.backward_tiles(d).shared_bytes) for d in DIMS),
    *(("backward/attention.cuh", f"BackwardConfig<{d}>::Q_ROWS", shapes.backward_tiles(d).q_rows) for d in DIMS),
    *(("backward/attention.cuh", f"BackwardConfig<{d}>::KV_ROWS", shapes.backward_tiles(d).kv_rows) for d in DIMS),
    *(("backward/attention.cuh", f"BackwardConfig<{d}>::WIDTH", shapes.backward_tiles(d).columns) for d in DIMS),
    *(
        ("forward/attention.cuh", f"ForwardConfig<{d}, {c}>::SHARED_BYTES", shapes.forward_tiles(d, c).shared_bytes)
        for d in DIMS
        for c in CONSUMER_CHOICES[d]
    ),
    *(("forward/attention.cuh", f"ForwardConfig<{d}, 2>::KV_ROWS", shapes.forward_tiles(d, 2).kv_rows) for d in DIMS),
    *((("device_planning/forward_tiles.cuh", f"(int)sizeof({name})", size)) for name, size in PACKED_BYTES.items()),
]


@pytest.mark.parametrize(("header", "config", "size"), SIZES)
def test_sizes(header: str, config: str, size: int) -> None:
    source = f'#include "{header}"\nstatic_assert({config} == {size});\n__global__ void nothing() {{}}\n'
    assert compile_uncached("size.cuh", "nothing", {"size.cuh": source}).cubin


def test_packed_sequences_are_ordered_by_the_same_rule() -> None:
    rules = {"FEW_KV_TILES": FEW_KV_TILES, "MANY_KV_TILES": MANY_KV_TILES}
    rules |= {name: getattr(alternating, name) for name in ("ONE_CLASS", "LARGE_GROUP")}
    asserts = "\n".join(f"static_assert({name} == {value});" for name, value in rules.items())
    source = f'#include "device_planning/chains.cuh"\n{asserts}\n__global__ void nothing() {{}}\n'
    assert compile_uncached("rule.cuh", "nothing", {"rule.cuh": source}).cubin
