// What happens to scores and to the rows of a softmax, the same in all passes.
//
// What is one operation and what two is written out, here and everywhere: left to the compiler, the variants of a kernel would differ in
// the last bit.
#pragma once
#include "common/ptx.cuh"

// In units of the cap: exp2 multiplies by it.
template <int N> DEVICE void cap_scores(float (&s)[N], float cap_scale) {
#pragma unroll
  for (int i = 0; i < N; i++) s[i] = tanh_half_log2(s[i] * cap_scale);
}

// ---- a row of the online softmax, of which a thread holds SCORES / 2 scores of each of two, r = 0 and 1
// Independent parts of the sums of a row.
__host__ __device__ constexpr int sum_lanes(int dim) { return dim == 64 ? 4 : 1; }

template <int SCORES> DEVICE float& row_score(float (&s)[SCORES], int r, int i) { return s[4 * (i / 2) + 2 * r + (i & 1)]; }

// Of a row in this tile. How maxima are grouped does not change them.
template <int SCORES> DEVICE float tile_max(float (&s)[SCORES], int r) {
  float largest = row_score(s, r, 0);
#pragma unroll
  for (int i = 1; i < SCORES / 2; i++) largest = fmaxf(largest, row_score(s, r, i));
  largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
  return fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
}

// What scores are reduced by. A row may have met no key yet.
DEVICE float shift_of(float largest, float scale_log2) { return largest == MINUS_INFINITY ? 0.f : __fmul_rn(largest, scale_log2); }
DEVICE float weight_of(float score, float scale_log2, float shift) { return exp2_approx(fmaf(score, scale_log2, -shift)); }
// What output and sum so far must be multiplied by.
DEVICE float rescale_of(float before, float scale_log2, float shift) { return exp2_approx(__fmul_rn(before, scale_log2) - shift); }

// Scores become weights, `part` their sums over this thread's columns.
template <int SCORES, int LANES> DEVICE void weigh(float (&s)[SCORES], int r, float scale_log2, float shift, float (&part)[LANES]) {
#pragma unroll
  for (int i = 0; i < SCORES / 2; i++) {
    float& x = row_score(s, r, i);
    x = weight_of(x, scale_log2, shift);
    part[i % LANES] = i < LANES ? x : part[i % LANES] + x;
  }
}

template <int LANES> DEVICE float add_to_sum(float sum, float rescale, const float (&part)[LANES]) {
  sum = fmaf(sum, rescale, part[0]);
#pragma unroll
  for (int i = 1; i < LANES; i++) sum += part[i];
  return sum;
}
