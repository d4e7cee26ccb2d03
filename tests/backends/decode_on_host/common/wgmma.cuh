// The warpgroup's matrix product, on the host: a thread computes its own elements. Descriptors are read as the hardware does.
#pragma once
#include "common/ptx.cuh"

struct Operand {
  u32 start, leading, stride;
  int row_bytes;

  DEVICE Operand(u64 d) {
    start = (u32)(d & 0x3fff) << 4 | (u32)this_cta() << 24;
    leading = (u32)(d >> 16 & 0x3fff) << 4;
    stride = (u32)(d >> 32 & 0x3fff) << 4;
    const int kind = (int)(d >> 62);
    row_bytes = kind == 1 ? 128 : kind == 2 ? 64 : kind == 3 ? 32 : 16;  // without a swizzle, groups of 8 rows of 16 bytes
  }
  DEVICE float at(u32 address) const { return from_bf16(load_shared<unsigned short>(row_bytes == 16 ? address : swizzled(address, row_bytes))); }
  // Rows along the depth: groups of 8 rows.
  DEVICE float along(int row, int depth) const {
    const u32 panel = row_bytes == 16 ? depth / 8 * leading + depth % 8 * 2 : depth * 2;
    return at(start + row / 8 * stride + row % 8 * row_bytes + panel);
  }
  // Transposed: groups of 8 depths, panels of columns.
  DEVICE float across(int depth, int column) const {
    const int width = row_bytes / 2;
    return at(start + column / width * leading + depth / 8 * stride + depth % 8 * row_bytes + column % width * 2);
  }
};

template <int N> DEVICE void multiply_on_host(bool accumulate, float (&d)[N], const float (&a)[2][16], const Operand& b, bool transposed) {
  const int lane = threadIdx.x % 32;
  for (int g = 0; g < N / 4; g++)
    for (int e = 0; e < 2; e++) {
      const int column = 8 * g + 2 * (lane & 3) + e;
      float sums[2] = {};
      for (int k = 0; k < 16; k++) {
        const float x = transposed ? b.across(k, column) : b.along(column, k);
        for (int r = 0; r < 2; r++) sums[r] += a[r][k] * x;
      }
      for (int r = 0; r < 2; r++) {
        float& mine = d[4 * g + 2 * r + e];
        mine = (accumulate ? mine : 0.f) + sums[r];
      }
    }
}
template <typename Half, int A_TRANSPOSED, int B_TRANSPOSED, int N> DEVICE void wgmma_ss(bool accumulate, float (&d)[N], u64 a, u64 b) {
  const Operand first(a);
  float rows[2][16];
  for (int r = 0; r < 2; r++)
    for (int k = 0; k < 16; k++) {
      const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + 8 * r;
      rows[r][k] = A_TRANSPOSED ? first.across(k, row) : first.along(row, k);
    }
  multiply_on_host(accumulate, d, rows, Operand(b), B_TRANSPOSED);
}
// A in registers: a[0] has depths 2 q and 2 q + 1 of the low row (q: lane % 4), a[1] of the high one, a[2] and a[3] those 8 further.
template <typename Half, int B_TRANSPOSED, int N> DEVICE void wgmma_rs(float (&d)[N], const u32* a, u64 b) {
  float rows[2][16];
  const int quad = threadIdx.x % 32 / 4 * 4;
  for (int i = 0; i < 4; i++) {
    const unsigned* all = exchange(a[i]);
    for (int q = 0; q < 4; q++)
      for (int e = 0; e < 2; e++) rows[i & 1][8 * (i / 2) + 2 * q + e] = from_bf16((unsigned short)(all[quad + q] >> (16 * e)));
  }
  multiply_on_host(true, d, rows, Operand(b), B_TRANSPOSED);
}
