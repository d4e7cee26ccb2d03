// Before the backward: delta = rowsum(dO * O) - dLSE, LSE in base 2 and padded to whole tiles, semaphores and ticket counter reset,
// tickets expanded (those of packed sequences by planning/chains.cuh).
#pragma once
#include "common/plan_tables.cuh"
#include "common/ptx.cuh"
#include "common/sequence.cuh"

// LANES threads sum a row, 16 bytes per lane.
template <typename Half, int LANES, int Q_ROWS, bool PACKED> __global__ void __launch_bounds__(256)
    backward_preprocess(const __grid_constant__ PreprocessParams p) {
  allow_next_kernel();
  const i64 thread = (i64)blockIdx.x * 256 + threadIdx.x, threads = (i64)gridDim.x * 256;
  if (thread == 0) p.next_ticket[0] = 0;
  for (i64 s = thread; s < p.semaphore_count; s += threads) p.semaphores[s] = 0;
  if constexpr (!PACKED) {
    if (thread == 0) p.next_ticket[1] = p.plan.tickets;
    for (i64 t = thread; t < p.plan.tickets; t += threads) {
      const Chain chain = chain_of_ticket(p.plan, (int)t);
      const Sequence sequence = sequence_of_batch(p.mask, chain.sequence, chain.sequence * p.tiles.q_heads * p.tiles.head_tiles);
      p.tickets[t] = expand_chain(p.plan, chain, sequence, p.kv_rows, p.tiles.q_heads / p.tiles.group, p.tiles.head_tiles);
    }
  }
  if (p.dq_to_zero != nullptr)
    for (i64 i = thread; i < p.floats_to_zero / 4; i += threads) ((float4*)p.dq_to_zero)[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  const i64 row = thread / LANES;  // of all tiles
  const int lane = (int)(thread % LANES);
  if (row >= (i64)tile_count(p.tiles) * Q_ROWS) return;
  const TilePlace place = locate<Q_ROWS, PACKED>(p.tiles, (int)(row / Q_ROWS));
  const int within = (int)(row % Q_ROWS);
  const bool exists = within < place.rows;
  float sum = 0.f;
  if (exists && lane * 8 < p.v_dim) {
    const uint4 x = *(const uint4*)((const unsigned short*)p.out + place.offset(p.out_strides, within) + lane * 8);
    const uint4 y = *(const uint4*)((const unsigned short*)p.grad_out + place.offset(p.grad_strides, within) + lane * 8);
    const u32 xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 a = unpack<Half>(xs[i]), b = unpack<Half>(ys[i]);
      sum = fmaf(a.y, b.y, fmaf(a.x, b.x, sum));
    }
  }
#pragma unroll
  for (int half = LANES / 2; half > 0; half /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, half);
  if (lane != 0) return;
  const float lse = exists ? p.lse[place.first_lse + within] : MINUS_INFINITY;
  // The derivative of the LSE by a score is that score's weight, as for delta but with the opposite sign. A row that attends
  // nothing has none.
  const bool slope = p.grad_lse != nullptr && lse != MINUS_INFINITY;
  p.delta[row] = slope ? sum - p.grad_lse[place.first_lse + within] : sum;
  p.lse_log2[row] = lse == MINUS_INFINITY ? FAR : lse * LOG2_E;
}
