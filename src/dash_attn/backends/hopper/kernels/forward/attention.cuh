// Attention forward: persistent CTAs take Q tiles by ticket. Each Q tile is one CTA's alone and visits its KV tiles in a fixed
// order, so the bits depend on nothing but the sequence itself.
#pragma once
#include "forward/consumer.cuh"
#include "forward/loader.cuh"

template <typename Half, int D, int CONSUMERS, bool SOFTCAP, MaskKind MASK>
__global__ void __launch_bounds__(ForwardConfig<D, CONSUMERS>::THREADS, 1)
    attention_forward(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                      const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap out_map,
                      const __grid_constant__ ForwardParams p) {
  using C = ForwardConfig<D, CONSUMERS>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  if (shared & 1023) __trap();  // the swizzle pattern needs 1024-byte alignment
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP;
  const ForwardBarrierHandles bars{shared + C::BARRIERS};
  if (threadIdx.x == 0) bars.init(4 * CONSUMERS);
  __syncthreads();
  if (warp < 4) {
    registers_decrease<C::LOADER_REGISTERS>();
    if (warp == 0 && lane == 0) ForwardLoader<D, CONSUMERS, MASK>{p, &q_map, &k_map, &v_map, shared, bars}.run();
  } else {
    registers_increase<C::CONSUMER_REGISTERS>();
    ForwardConsumer<Half, D, CONSUMERS, SOFTCAP, MASK>(p, shared, bars, warp, lane).run(&out_map);
  }
}
