// After the backward: the dQ accumulator, in fragment order, becomes dQ in the caller's layout and type.
#pragma once
#include "backward_config.cuh"

struct PostprocessParams {
  const float* dq_accumulator;
  const int* ranks_per_q_tile;  // 0: no chain visited this tile, its accumulator was never written
  void* dq;                     // (batch, q_len, q_heads, D)
  i64 strides[3];               // elements: batch, row, head
  int q_heads, q_len, q_tiles;
  float scale;
};

template <typename Half, int D, int Q_ROWS> __global__ void __launch_bounds__(256) backward_postprocess(const __grid_constant__ PostprocessParams p) {
  using C = BackwardConfig<D, Q_ROWS>;
  constexpr int PITCH = D + 8;  // padded rows: no bank conflicts
  __shared__ alignas(16) unsigned short rows[Q_ROWS * PITCH];
  const int q_tile = blockIdx.x % p.q_tiles;
  const i64 head_of_batch = blockIdx.x / p.q_tiles;
  const float4* tile = (const float4*)(p.dq_accumulator + (i64)blockIdx.x * (Q_ROWS * D));
  const bool visited = p.ranks_per_q_tile[q_tile] > 0;
  for (int i = threadIdx.x; i < Q_ROWS * D / 4; i += 256) {
    const float4 v = visited ? tile[i] : make_float4(0.f, 0.f, 0.f, 0.f);
    const float x[4] = {v.x, v.y, v.z, v.w};
    const int wg = i / (Q_ROWS * D / 8), rest = i % (Q_ROWS * D / 8), group = rest / 128, warp = rest % 128 / 32, lane = rest % 32;
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int m = 16 * warp + (lane >> 2) + 8 * (e >> 1), n = 8 * group + 2 * (lane & 3) + (e & 1);
      const int row = C::DQ_TRANSPOSED ? wg * (Q_ROWS / 2) + n : m, column = C::DQ_TRANSPOSED ? m : wg * 64 + n;
      rows[row * PITCH + column] = (unsigned short)(pack<Half>(x[e] * p.scale, 0.f) & 0xffff);
    }
  }
  __syncthreads();
  const i64 batch = head_of_batch / p.q_heads, head = head_of_batch % p.q_heads;
  unsigned short* out = (unsigned short*)p.dq + batch * p.strides[0] + head * p.strides[2];
  for (int i = threadIdx.x; i < Q_ROWS * D / 8; i += 256) {
    const int row = i / (D / 8), chunk = i % (D / 8);
    const i64 query = (i64)q_tile * Q_ROWS + row;
    if (query < p.q_len) *(uint4*)(out + query * p.strides[1] + chunk * 8) = *(const uint4*)&rows[row * PITCH + chunk * 8];
  }
}
