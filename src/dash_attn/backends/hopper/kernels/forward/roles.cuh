// What the warps of a forward CTA do: one loads, those of the consumers compute, one per consumer stores. With modifiers: dropout, ALiBi or both.
#pragma once
#include "forward/consumer.cuh"
#include "forward/loader.cuh"
#include "forward/storer.cuh"

template <typename Half, int D, int CONSUMERS, bool SOFTCAP, MaskKind MASK, bool DROPOUT = false, bool ALIBI = false, int V_DIM = D>
DEVICE void run_forward(const TensorMap& q_map, const TensorMap& k_map, const TensorMap& v_map, const TensorMap& out_map,
                        const ForwardParams& p, const ModifierParams* m = nullptr) {
  using C = ForwardConfig<D, CONSUMERS, V_DIM>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  if (shared & 1023) __trap();  // the swizzle pattern needs 1024-byte alignment
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP;
  const ForwardBarrierHandles bars{shared + C::BARRIERS};
  if (threadIdx.x == 0) bars.init<C>();
  __syncthreads();
  if (warp < 4) {
    registers_decrease<C::LOADER_REGISTERS>();
    if (warp == 0 && lane == 0) ForwardLoader<C, MASK, DROPOUT || ALIBI>{p, &q_map, &k_map, &v_map, shared, bars, m}.run();
    if (warp > 0 && warp <= CONSUMERS) ForwardStorer<C, MASK>{&out_map, shared, bars, warp - 1, lane}.run();
  } else {
    registers_increase<C::CONSUMER_REGISTERS>();
    ForwardConsumer<Half, D, CONSUMERS, SOFTCAP, MASK, DROPOUT, ALIBI, V_DIM>(p, shared, bars, warp, lane, m).run();
  }
}
