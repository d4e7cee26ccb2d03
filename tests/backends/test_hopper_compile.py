"""Kernels compile for sm_90a, without a GPU: no spills, no serialised wgmma, parameters laid out as Python says.

The backward in bfloat16 is here, all other variants are in test_hopper_compile_others.py: a file is what one process runs.
"""

from __future__ import annotations

import re

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")

from importlib import import_module

from dash_attn.backends.hopper import tiles as shapes
from dash_attn.backends.hopper.driver import shared_header
from dash_attn.backends.hopper.driver.compile import CompileError, compile_uncached, sources
from dash_attn.backends.hopper.driver.parameters import STRUCTURES
from dash_attn.scheduling.generators import FEW_KV_TILES
from dash_attn.scheduling.problem import ROWS_OF_A_CHAIN
from dash_attn.scheduling.schedule import CACHED, MANY_KV_TILES
from kernel_cases import cases
from kernel_variants import BACKWARD_DIMS, BF16_BACKWARD, DIMS, assembler_complaints

alternating = import_module("dash_attn.scheduling.generators.alternating")
CONSUMER_CHOICES = import_module("dash_attn.backends.hopper.tiles").CONSUMER_CHOICES


@pytest.mark.parametrize(("header", "name"), cases(BF16_BACKWARD))
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


def test_python_and_the_compiler_lay_structures_out_alike() -> None:
    """Every kernel asserts it; here all structures at once, and the control: a member that Python has elsewhere."""
    source = f'#include "{shared_header.NAME}"\n__global__ void nothing() {{}}\n'
    assert compile_uncached("layout.cuh", "nothing", {"layout.cuh": source}).cubin
    text = shared_header.shared_header()
    assert len(STRUCTURES) > 15
    assert text.count("static_assert(sizeof(") == len(STRUCTURES)
    moved = text.replace("  int q_shift, q_plane, kv_shift, kv_plane;", "  int q_plane, q_shift, kv_shift, kv_plane;")
    assert moved != text
    with pytest.raises(CompileError, match=r"Python has Sequence\.q_shift elsewhere"):
        compile_uncached("layout.cuh", "nothing", {"layout.cuh": source, shared_header.NAME: moved})


def test_a_member_of_another_type_is_seen() -> None:
    text = shared_header.shared_header()
    changed = text.replace("  float scale;", "  double scale;")
    assert changed != text
    source = f'#include "{shared_header.NAME}"\n__global__ void nothing() {{}}\n'
    with pytest.raises(CompileError, match="Python"):
        compile_uncached("layout.cuh", "nothing", {"layout.cuh": source, shared_header.NAME: changed})


SIZES = [
    *(
        ("backward/attention.cuh", f"BackwardConfig<{dim}, {v_dim}>::{constant}", getattr(shapes.backward_tiles(dim, v_dim), member))
        for dim, v_dim in BACKWARD_DIMS
        for constant, member in (
            ("SHARED_BYTES", "shared_bytes"),
            ("Q_ROWS", "q_rows"),
            ("KV_ROWS", "kv_rows"),
            ("WIDTH", "columns"),
            ("SUM_PIECES", "sum_pieces"),
        )
    ),
    *(  # dK and dV of a KV tile, in float32
        (
            "backward/attention.cuh",
            f"BackwardConfig<{dim}, {v_dim}>::SUM_PIECES * BackwardConfig<{dim}, {v_dim}>::SUM_FLOATS",
            shapes.backward_tiles(dim, v_dim).kv_rows * (dim + v_dim),
        )
        for dim, v_dim in BACKWARD_DIMS
    ),
    ("backward/attention.cuh", "sizeof(ChainRecord)", 64),
    *(
        ("forward/attention.cuh", f"ForwardConfig<{d}, {c}, {v}>::SHARED_BYTES", shapes.forward_tiles(d, c, v).shared_bytes)
        for d, v in shapes.FORWARD_DIMS
        for c in CONSUMER_CHOICES[shapes.kernel_dim(d)]
    ),
    *(("forward/attention.cuh", f"ForwardConfig<{d}, 2>::KV_ROWS", shapes.forward_tiles(d, 2).kv_rows) for d, _ in shapes.FORWARD_DIMS),
    *(("decode/attention.cuh", f"DecodeConfig<{d}>::SHARED_BYTES", shapes.decode_tiles(d).shared_bytes) for d in DIMS),
    *(("decode/attention.cuh", f"DecodeConfig<{d}>::KV_ROWS", shapes.forward_tiles(d, 2).kv_rows) for d in DIMS),
    *(
        ("decode/cluster.cuh", f"ClusterConfig<{d}, {columns}>::SHARED_BYTES", shapes.cluster_tiles(d, columns).shared_bytes)
        for d, columns, _ in shapes.CLUSTERS
    ),
    ("decode/cluster.cuh", "ClusterConfig<128, 32>::CTAS", 4),
    ("decode/cluster.cuh", "ClusterConfig<64, 16>::THREADS", shapes.CLUSTER_THREADS),
    ("decode/cluster.cuh", "ClusterConfig<64, 16>::ROWS", shapes.CLUSTER_ROWS),
    ("decode/attention.cuh", "DecodeConfig<64>::THREADS", shapes.DECODE_THREADS),
    ("decode/attention.cuh", "DecodeConfig<64>::ROWS", shapes.DECODE_ROWS),
]


@pytest.mark.parametrize(("header", "config", "size"), SIZES)
def test_sizes(header: str, config: str, size: int) -> None:
    source = f'#include "{header}"\nstatic_assert({config} == {size});\n__global__ void nothing() {{}}\n'
    assert compile_uncached("size.cuh", "nothing", {"size.cuh": source}).cubin


# Every float4 of a state, by warpgroup and register: where a consumer takes it is where SumFinisher of the postprocess reads it.
STATES = """
#include "backward/postprocess.cuh"
template <int D, int DV> constexpr bool states_are_read_as_they_are_taken() {
  using C = BackwardConfig<D, DV>;
  constexpr int IN_PIECE = C::SUM_FLOATS / 8, TALL = is_tall(DV), REGISTERS = C::SUM_PIECES * C::SUM_REGISTERS;
  bool found[C::SUM_PIECES * C::SUM_FLOATS / 4 / WARPGROUP] = {};
  for (int wg = 0; wg < 2; wg++)
    for (int first = 0; first < REGISTERS; first += 4) {
      const int of_dk = TALL ? first >= DV / 2 : wg, i = (first - (TALL ? of_dk * DV / 2 : 0)) / 4 * WARPGROUP;
      const int quad = i + TALL * of_dk * (64 * DV / 4);
      const int at = quad / IN_PIECE * (C::SUM_FLOATS / 4) + wg * IN_PIECE + quad % IN_PIECE;
      if (at != state_quad<C>(wg, first) || found[at / WARPGROUP] || at % WARPGROUP) return false;
      for (int thread = 0; thread < WARPGROUP; thread++)
        if (C::of_dv(at + thread) == of_dk) return false;
      found[at / WARPGROUP] = true;
    }
  for (bool one : found)
    if (!one) return false;
  return true;
}
"""


@pytest.mark.parametrize("dims", BACKWARD_DIMS, ids=str)
def test_states_have_the_layout_of_sums(dims: tuple[int, int]) -> None:
    check = f"static_assert(states_are_read_as_they_are_taken<{dims[0]}, {dims[1]}>());\n__global__ void nothing() {{}}\n"
    assert compile_uncached("states.cuh", "nothing", {"states.cuh": STATES + check}).cubin
    with pytest.raises(CompileError, match="static assertion failed"):  # the control: warpgroups the other way round
        compile_uncached("states.cuh", "nothing", {"states.cuh": STATES.replace("state_quad<C>(wg,", "state_quad<C>(1 - wg,") + check})


def test_the_device_plans_by_the_generators_constants() -> None:
    """They are written into the header. The control: one that the text would not follow."""
    text = shared_header.shared_header()
    constants = {"FEW_KV_TILES": FEW_KV_TILES, "MANY_KV_TILES": MANY_KV_TILES, "ONE_CLASS": alternating.ONE_CLASS, "CACHED": CACHED}
    for name, value in {**constants, "MANY_MEMBERS": alternating.MANY_MEMBERS, "ROWS_OF_A_CHAIN": ROWS_OF_A_CHAIN}.items():
        assert f"constexpr int {name} = {value};" in text
    planning = "".join(source for name, source in sources().items() if name.startswith("planning/"))
    words = "FEW_KV_TILES|ONE_CLASS|ONE_CAUSAL_CLASS|MANY_MEMBERS|ROWS_OF_A_CHAIN|MANY_KV_TILES|HAND_OVER|LARGEST_BLOCK|CACHED|LATE"
    assert not re.search(rf"constexpr int ({words}|TOO_LONG)", planning)


def test_the_hash_is_of_the_machine_code() -> None:
    """A constant that nobody uses, and a comment, leave it; another instruction does not."""
    plain = "__global__ void add(float* x) { x[threadIdx.x] += 1.f; }\n"
    texts = (plain, f"// more\nconstexpr int UNUSED = 7;\n{plain}", plain.replace("1.f", "2.f"))
    first, same, other = (compile_uncached("add.cuh", "add", {"add.cuh": text}) for text in texts)
    assert first.sha256 == same.sha256 != other.sha256
    assert first.cubin != same.cubin  # the control: the file did change
