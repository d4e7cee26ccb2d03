"""Writes common/wgmma.cuh, the wrappers of the warpgroup matrix product: too regular to be written (or read) by hand.

D[64 x n] (+)= A[64 x 16] B[16 x n]: D in registers, B in shared memory, A in shared memory (ss) or registers (rs).
"""

from functools import cache

WIDTHS = (8, 16, 32, 64, 80, 96, 112, 128, 192, 256)
DTYPES = ("bf16", "f16")


@cache
def wgmma_header() -> str:
    functions = [write(n) for n in WIDTHS for write in (_ss, _rs)]
    return "\n".join(['#pragma once\n#include "common/types.cuh"', *functions]) + "\n"


def _ss(n: int) -> str:
    """A and B in shared memory. Without `accumulate` the old value of D is not read, so its registers are free before."""
    d = n // 2
    operands = f"%{d}, %{d + 1}, on, 1, 1, %{d + 2}, %{d + 3}"
    inputs = '"l"(a), "l"(b), "n"(A_TRANSPOSED), "n"(B_TRANSPOSED)'
    lines = [
        "template <typename Half, int A_TRANSPOSED, int B_TRANSPOSED>",
        f"DEVICE void wgmma_ss(bool accumulate, float (&d)[{d}], u64 a, u64 b) {{",
    ]
    for dtype in DTYPES:
        for accumulate in (True, False):
            condition = f"{_is(dtype)} && {'' if accumulate else '!'}accumulate"
            lines += [f"  if ({condition})", _asm(n, dtype, operands, inputs, accumulate)]
    return "\n".join([*lines, "}"])


def _rs(n: int) -> str:
    """A in registers; always accumulates."""
    d = n // 2
    operands = f"{{%{d}, %{d + 1}, %{d + 2}, %{d + 3}}}, %{d + 4}, on, 1, 1, %{d + 5}"
    inputs = '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(B_TRANSPOSED)'
    lines = ["template <typename Half, int B_TRANSPOSED>", f"DEVICE void wgmma_rs(float (&d)[{d}], const u32* a, u64 b) {{"]
    for dtype in DTYPES:
        lines += [f"  if constexpr ({_is(dtype)})", _asm(n, dtype, operands, inputs, accumulate=True)]
    return "\n".join([*lines, "}"])


def _is(dtype: str) -> str:
    return "Half::is_bf16" if dtype == "bf16" else "!Half::is_bf16"


def _asm(n: int, dtype: str, operands: str, inputs: str, accumulate: bool) -> str:
    registers = range(n // 2)
    accumulators = ", ".join(f"%{i}" for i in registers)
    outputs = ", ".join(f'"{"+" if accumulate else "="}f"(d[{i}])' for i in registers)
    return (
        f'    asm volatile("{{\\n.reg .pred on;\\nsetp.ne.b32 on, {int(accumulate)}, 0;\\n"\n'
        f'                 "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype} {{{accumulators}}}, {operands};\\n}}\\n"\n'
        f"                 : {outputs}\n                 : {inputs});"
    )
