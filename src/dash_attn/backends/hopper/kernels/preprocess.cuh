// Before the backward: delta = rowsum(dO * O), LSE in base 2 and padded to whole tiles, semaphores and ticket counter reset,
// tickets expanded.
#pragma once
#include "plan.cuh"
#include "ptx.cuh"

struct PreprocessParams {
  const void *out, *grad_out;           // (batch, q_len, q_heads, D), last dimension contiguous
  i64 out_strides[3], grad_strides[3];  // elements: batch, row, head
  const float* lse;                     // [batch][q_heads][q_len], natural log
  float *lse_log2, *delta;              // [batch * q_heads][padded_len]
  float* dq_to_zero;                    // the dQ accumulator in unordered mode, else null
  int* semaphores;
  int* next_ticket;
  Ticket* tickets;
  int batch, q_heads, group, q_len, padded_len, q_tiles;
  PlanTables plan;
};

template <typename Half, int D> __global__ void __launch_bounds__(256) backward_preprocess(const __grid_constant__ PreprocessParams p) {
  constexpr int LANES = D / 8;  // 16 bytes a lane
  static_assert((LANES & (LANES - 1)) == 0, "a row is summed by a power of two of lanes");
  const i64 thread = (i64)blockIdx.x * 256 + threadIdx.x;
  if (thread == 0) *p.next_ticket = 0;
  if (thread < (i64)p.batch * p.q_heads * p.q_tiles) p.semaphores[thread] = 0;
  for (i64 t = thread; t < p.plan.tickets; t += (i64)gridDim.x * 256)
    p.tickets[t] = expand_ticket(p.plan, (int)t, p.q_heads, p.group, p.q_tiles);
  const i64 row = thread / LANES;  // over (batch, head, padded row)
  const int lane = (int)(thread % LANES);
  if (row >= (i64)p.batch * p.q_heads * p.padded_len) return;
  if (p.dq_to_zero != nullptr) {
    float4* at = (float4*)(p.dq_to_zero + thread * 8);
    at[0] = at[1] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  const i64 head_of_batch = row / p.padded_len;
  const int at = (int)(row % p.padded_len), head = (int)(head_of_batch % p.q_heads), batch = (int)(head_of_batch / p.q_heads);
  const bool exists = at < p.q_len;
  float sum = 0.f;
  if (exists) {
    const unsigned short* out = (const unsigned short*)p.out + batch * p.out_strides[0] + at * p.out_strides[1] + head * p.out_strides[2];
    const unsigned short* grad =
        (const unsigned short*)p.grad_out + batch * p.grad_strides[0] + at * p.grad_strides[1] + head * p.grad_strides[2];
    const uint4 x = *(const uint4*)(out + lane * 8), y = *(const uint4*)(grad + lane * 8);
    const u32 xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 a = unpack<Half>(xs[i]), b = unpack<Half>(ys[i]);
      sum += a.x * b.x + a.y * b.y;
    }
  }
#pragma unroll
  for (int half = LANES / 2; half > 0; half /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, half);
  if (lane != 0) return;
  const float lse = exists ? p.lse[head_of_batch * p.q_len + at] : MINUS_INFINITY;
  p.delta[row] = sum;
  p.lse_log2[row] = lse == MINUS_INFINITY ? FAR : lse * LOG2_E;
}
