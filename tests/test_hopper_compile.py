"""Every kernel variant compiles for sm_90a, without a GPU: no spills, no serialised wgmma, parameters laid out as Python says."""

from __future__ import annotations

import ctypes
import re

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")

from importlib import import_module

from dash_attn.backends.hopper import shapes, structs
from dash_attn.backends.hopper.compile import CompileError, compile_uncached
from dash_attn.generators.auto import FEW_KV_TILES
from dash_attn.schedule import MANY_KV_TILES

alternating = import_module("dash_attn.generators.alternating")
CONSUMER_CHOICES = import_module("dash_attn.backends.hopper.forward").CONSUMER_CHOICES
lanes_of = import_module("dash_attn.backends.hopper.backward").lanes_of

packed = import_module("dash_attn.backends.hopper.packed")
PACKED_BYTES = {
    "Sequence": packed.SEQUENCE_BYTES,
    "SequenceParts": packed.PARTS_BYTES,
    "PackedChain": packed.CHAIN_BYTES,
    "PackedTile": packed.TILE_BYTES,
    "Ticket": import_module("dash_attn.backends.hopper.backward").TICKET_BYTES,
}

DTYPES = ("bf16", "f16")
DIMS = shapes.KERNEL_DIMS
MASKS = ("Band", "Rows", "Blocks", "Packed")
FLAGS = ("true", "false")
TILES = {(shapes.backward_tiles(dim).q_rows, shapes.backward_tiles(dim).kv_rows) for dim in DIMS}
FORWARD_SHAPES = {(64 * c, shapes.forward_tiles(dim, c).kv_rows) for dim in DIMS for c in CONSUMER_CHOICES[dim]}
BACKWARD = [
    f"attention_backward<{dtype}, {dim}, {ordered}, {softcap}, MaskKind::{mask}>"
    for dtype in DTYPES
    for dim in DIMS
    for ordered, softcap in (("true", "false"), ("true", "true"), ("false", "false"))  # what support.py allows
    for mask in MASKS
]
RECORDING = [f"attention_backward<bf16, {dim}, true, false, MaskKind::Band, true>" for dim in DIMS]
FORWARD = [
    f"attention_forward<{dtype}, {dim}, {consumers}, {softcap}, MaskKind::{mask}>"
    for dtype in DTYPES
    for dim in DIMS
    for consumers in CONSUMER_CHOICES[dim]
    for softcap in FLAGS
    for mask in MASKS
]
HELPERS = [
    *(
        ("preprocess.cuh", f"backward_preprocess<{dtype}, {lanes_of(dim)}, {shapes.backward_tiles(dim).q_rows}, {packed}>")
        for dtype in DTYPES
        for dim in DIMS
        for packed in FLAGS
    ),
    *(("postprocess.cuh", f"backward_postprocess<{dtype}, {dim}, {packed}>") for dtype in DTYPES for dim in DIMS for packed in FLAGS),
    *(("sink_gradient.cuh", f"sink_gradient<{rows}, {packed}>") for rows in (64, 128) for packed in FLAGS),
    *(("packed_plan.cuh", f"packed_layout<{q}, {kv}, true>") for q, kv in sorted(TILES)),
    *(("packed_plan.cuh", f"packed_plan<{q}, {kv}>") for q, kv in sorted(TILES)),
    *(("packed_plan.cuh", f"packed_layout<{q}, {kv}, false>") for q, kv in sorted(FORWARD_SHAPES)),
    *(("packed_tiles.cuh", f"packed_tiles<{q}, {kv}>") for q, kv in sorted(FORWARD_SHAPES)),
]
VARIANTS = [
    *(("backward.cuh", name) for name in (*BACKWARD, *RECORDING)),
    *(("forward.cuh", name) for name in FORWARD),
    *dict.fromkeys(HELPERS),
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
    "preprocess.cuh": (structs.TilePlaces, structs.PreprocessParams),
    "sink_gradient.cuh": (structs.SinkGradientParams,),
    "packed_plan.cuh": (structs.PackedParams,),
    "packed_tiles.cuh": (structs.PackedTilesParams,),
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
    *(("backward.cuh", f"BackwardConfig<{d}>::SHARED_BYTES", shapes.backward_tiles(d).shared_bytes) for d in DIMS),
    *(("backward.cuh", f"BackwardConfig<{d}>::Q_ROWS", shapes.backward_tiles(d).q_rows) for d in DIMS),
    *(("backward.cuh", f"BackwardConfig<{d}>::KV_ROWS", shapes.backward_tiles(d).kv_rows) for d in DIMS),
    *(("backward.cuh", f"BackwardConfig<{d}>::WIDTH", shapes.backward_tiles(d).columns) for d in DIMS),
    *(
        ("forward.cuh", f"ForwardConfig<{d}, {c}>::SHARED_BYTES", shapes.forward_tiles(d, c).shared_bytes)
        for d in DIMS
        for c in CONSUMER_CHOICES[d]
    ),
    *(("forward.cuh", f"ForwardConfig<{d}, 2>::KV_ROWS", shapes.forward_tiles(d, 2).kv_rows) for d in DIMS),
    *((("packed_tiles.cuh", f"(int)sizeof({name})", size)) for name, size in PACKED_BYTES.items()),
]


@pytest.mark.parametrize(("header", "config", "size"), SIZES)
def test_sizes(header: str, config: str, size: int) -> None:
    source = f'#include "{header}"\nstatic_assert({config} == {size});\n__global__ void nothing() {{}}\n'
    assert compile_uncached("size.cuh", "nothing", {"size.cuh": source}).cubin


def test_packed_sequences_are_ordered_by_the_same_rule() -> None:
    rules = {"FEW_KV_TILES": FEW_KV_TILES, "MANY_KV_TILES": MANY_KV_TILES}
    rules |= {name: getattr(alternating, name) for name in ("ONE_CLASS", "LARGE_GROUP")}
    asserts = "\n".join(f"static_assert({name} == {value});" for name, value in rules.items())
    source = f'#include "packed_plan.cuh"\n{asserts}\n__global__ void nothing() {{}}\n'
    assert compile_uncached("rule.cuh", "nothing", {"rule.cuh": source}).cubin
