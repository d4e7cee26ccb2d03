// The kernel that sums bits as a host library, for tests/backends/test_bit_sums_kernel.py.
#include "ledger/bit_sums.cuh"
#include "fibers.h"

static BitSumsParams params;

extern "C" void launch(const BitSumsParams* given) {
  params = *given;
  for (u32 block = 0; block < params.ctas; block++) run_block(block, [] { bit_sums(params); });
}
