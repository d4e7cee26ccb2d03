// attention_forward with dropout, ALiBi or both. Kernels of their own, so that the plain ones keep their machine code.
#pragma once
#include "forward/consumer.cuh"
#include "forward/loader.cuh"

template <typename Half, int D, int CONSUMERS, bool SOFTCAP, MaskKind MASK, bool DROPOUT, bool ALIBI>
__global__ void __launch_bounds__(ForwardConfig<D, CONSUMERS>::THREADS, 1)
    attention_forward_modified(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                               const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap out_map,
                               const __grid_constant__ ForwardParams p, const __grid_constant__ ModifierParams m) {
  using C = ForwardConfig<D, CONSUMERS>;
  static_assert(C::SHARED_BYTES % 16 == 0 && C::SHARED_BYTES + 2 * MODIFIER_NOTE_BYTES <= MOST_SHARED_BYTES, "room for notes");
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  if (shared & 1023) __trap();  // the swizzle pattern needs 1024-byte alignment
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP;
  const ForwardBarrierHandles bars{shared + C::BARRIERS};
  if (threadIdx.x == 0) bars.init(4 * CONSUMERS);
  __syncthreads();
  if (warp < 4) {
    registers_decrease<C::LOADER_REGISTERS>();
    if (warp == 0 && lane == 0) ForwardLoader<D, CONSUMERS, MASK, true>{p, &q_map, &k_map, &v_map, shared, bars, &m}.run();
  } else {
    registers_increase<C::CONSUMER_REGISTERS>();
    ForwardConsumer<Half, D, CONSUMERS, SOFTCAP, MASK, DROPOUT, ALIBI>(p, shared, bars, warp, lane, &m).run(&out_map);
  }
}
