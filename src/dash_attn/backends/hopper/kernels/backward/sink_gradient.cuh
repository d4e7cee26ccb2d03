// The gradient of attention sinks: dsink = - sum over rows of exp(sink - LSE) delta. One block per query head. Rows are added in a
// fixed order, sequence by sequence, so that the sum of a sequence does not depend on its neighbours.
#pragma once
#include "common/ptx.cuh"
#include "common/sequence.cuh"

template <int Q_ROWS, bool PACKED> __global__ void __launch_bounds__(256) sink_gradient(const __grid_constant__ SinkGradientParams p) {
  __shared__ float sums[256];
  const int head = blockIdx.x;
  const float sink = __fmul_rn(p.sinks[head], LOG2_E);
  float total = 0.f;
  for (int s = 0; s < p.sequences; s++) {
    const int first =
        PACKED ? head * p.tiles.head_tiles + p.tiles.sequences[s].first_tile : (s * p.tiles.q_heads + head) * p.tiles.head_tiles;
    const int rows = PACKED ? p.tiles.sequences[s].q_len : p.tiles.q_len;
    float sum = 0.f;
    for (int i = threadIdx.x; i < rows; i += 256) {
      const i64 at = (i64)first * Q_ROWS + i;
      sum = fmaf(exp2_approx(sink - p.lse_log2[at]), p.delta[at], sum);
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
      if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
      __syncthreads();
    }
    total += sums[0];
    __syncthreads();
  }
  if (threadIdx.x == 0) p.gradient[head] = -total;
}
