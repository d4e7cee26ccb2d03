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
