"""Writes ledger/shared_with_python.cuh: what Python shares with the kernel that sums bits for ledgers.

Apart from the header of all other kernels: what the ledger needs does not compile attention again.
"""

from functools import cache
from typing import Any

from .structures import declaration, structures_in

NAME = "ledger/shared_with_python.cuh"
MOST_TENSORS = 192  # of a launch: their table travels as a kernel parameter, which has room for 4 KB
THREADS = 256
CTAS_PER_SM = 5  # as many as the registers of an SM allow
CHUNK_BYTES = 16 * 1024
# INDEX and ROUNDS of ledgers/bit_sums.py, which says why.
INDEX_FACTOR = 0x9E3779B97F4A7C15
MIX_SHIFTS = (30, 27, 31)
MIX_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
BitSumsParams: Any = structures_in(f"""
struct BitSumsParams {{
  const void* tensors[{MOST_TENSORS}];  // any address
  u64 sizes[{MOST_TENSORS}];  // in bytes
  u64* sums;  // one per tensor, added to
  u32 first_chunks[{MOST_TENSORS + 1}];  // of each tensor; then the number of chunks
  int count;  // tensors
  u32 ctas;  // of the launch
}};
""")["BitSumsParams"]


@cache
def bit_sums_header() -> str:
    sizes = {"SUM_THREADS": THREADS, "SUM_CTAS_PER_SM": CTAS_PER_SM, "CHUNK_BYTES": CHUNK_BYTES}
    shifts = {f"MIX_SHIFT_{place}": shift for place, shift in enumerate(MIX_SHIFTS, 1)}
    factors = {"INDEX_FACTOR": INDEX_FACTOR, **{f"MIX_FACTOR_{place}": factor for place, factor in enumerate(MIX_FACTORS, 1)}}
    lines = [
        "// Written by backends/hopper/driver/bit_sums_header.py.",
        '#pragma once\n#include "common/types.cuh"',
        *(f"constexpr int {name} = {value};" for name, value in {**sizes, **shifts}.items()),
        *(f"constexpr u64 {name} = {value:#x}ull;" for name, value in factors.items()),
        declaration(BitSumsParams),
    ]
    return "\n".join(lines) + "\n"
