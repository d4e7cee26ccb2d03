// Where trips end: states, unscaled dK and dV of chains that have walked all their legs, are added to the sums of their KV tiles. As the
// drains do it: the first one of a sum is stored, the others are added by the same bulk reduces, in the order of the parts. The
// postprocess finishes the sums. A block has 4 KB of one sum.
#pragma once
#include "backward/config.cuh"

constexpr int ENDING_QUADS = 256;  // float4s of a block: one per thread

template <int D, int DV> __global__ void __launch_bounds__(ENDING_QUADS) end_trips(const __grid_constant__ EndingParams p) {
  using C = BackwardConfig<D, DV>;
  constexpr int BYTES = 16 * ENDING_QUADS, QUADS = C::SUM_PIECES * C::SUM_FLOATS / 4, BLOCKS = QUADS / ENDING_QUADS;
  static_assert(C::SUM_FLOATS / 4 % ENDING_QUADS == 0, "a block has a part of one piece");
  __shared__ alignas(128) float4 staging[ENDING_QUADS];
  const EndingRecord& ending = p.endings[blockIdx.x / BLOCKS];
  const int block = blockIdx.x % BLOCKS, quad = block * ENDING_QUADS + threadIdx.x;
  const u32 shared = shared_address(staging);
  float* to = p.sums + ((i64)ending.sum * QUADS + block * ENDING_QUADS) * 4;
  for (int i = 0; i < ending.count; i++) {
    const float4* state = (const float4*)p.states + (i64)(ending.first + i * ending.stride) * QUADS;
    const float4 v = __ldcg(state + quad);
    const float factor = C::of_dv(quad) ? C::DV_FACTOR : 1.f;
    store_shared_f32x4(shared + threadIdx.x * 16, v.x * factor, v.y * factor, v.z * factor, v.w * factor);
    fence_async_shared();
    __syncthreads();
    if (threadIdx.x == 0) {
      if (ending.turn + i == 0)
        bulk_store(to, shared, BYTES);
      else
        bulk_reduce_add_f32(to, shared, BYTES);
      bulk_commit();
      bulk_wait();  // landed, before the next one is added
      fence_async_global();
    }
    __syncthreads();
  }
  constexpr int BLOCKS_OF_PIECE = C::SUM_FLOATS / 4 / ENDING_QUADS;
  if (threadIdx.x == 0 && block % BLOCKS_OF_PIECE == 0)
    p.semaphores[ending.sum * C::SUM_PIECES + block / BLOCKS_OF_PIECE] = ending.turn + ending.count;
}
