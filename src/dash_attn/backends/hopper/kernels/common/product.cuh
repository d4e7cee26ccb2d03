// Products of matrices on the tensor cores: D = A B or D += A B. D is in registers, B in shared memory, A in either.
//
// A matrix in shared memory lies in panels (common/types.cuh), `panel` bytes each, from byte `at` on. `base` is where the shared memory
// begins, in units of descriptors; its upper half may move panels.
#pragma once
#include "common/ptx.cuh"
#include "common/wgmma.cuh"

// Its rows are rows of A or columns of B, so the product goes along its columns.
struct RowsOf {
  static constexpr int TRANSPOSED = 0;
  u32 base;
  int at, panel;
  DEVICE u64 operator[](int k) const { return descriptor(base + descriptor_low(at + (k / 4) * panel + (k % 4) * SIXTEEN_COLUMNS)); }
};
// Its columns are those of B, or rows of A: the product goes along its rows. Of one panel alone, `panel` does not matter.
struct ColumnsOf {
  static constexpr int TRANSPOSED = 1;
  u32 base;
  int at, panel = DESCRIPTOR_UNIT;
  DEVICE u64 operator[](int k) const { return descriptor(base + descriptor_low(at + k * SIXTEEN_ROWS, panel)); }
};

// D = A B, of DEPTH columns of A.
template <typename Half, int DEPTH, int N, typename A, typename B> DEVICE void multiply(float (&d)[N], const A& a, const B& b) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < DEPTH / 16; k++) wgmma_ss<Half, A::TRANSPOSED, B::TRANSPOSED>(k > 0, d, a[k], b[k]);
  wgmma_commit();
}
// D += A B with A in registers, which are as many as it has columns for a thread.
template <typename Half, int N, int PAIRS> DEVICE void multiply_add(float (&d)[N], const u32 (&a)[PAIRS], const ColumnsOf& b) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < PAIRS / 4; k++) wgmma_rs<Half, 1>(d, a + 4 * k, b[k]);
  wgmma_commit();
}
