// Attention to a cache: one CTA per unit (decode/config.cuh), in any order.
#pragma once
#include "decode/consumer.cuh"
#include "decode/loader.cuh"

template <typename Half, int D, bool SOFTCAP> __global__ void __launch_bounds__(DecodeConfig<D>::THREADS, DecodeConfig<D>::CTAS)
    attention_decode(const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
                     const __grid_constant__ DecodeParams p) {
  using C = DecodeConfig<D>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  if (shared & 1023) __trap();  // the swizzle pattern needs 1024-byte alignment
  Unit unit(p, blockIdx.x, C::ROWS);
  if (!unit.has_rows()) return;
  const CacheSlots slots(p.cache, unit.sequence);
  unit.look_at_keys(p, slots);
  const int warp = warp_index(), lane = threadIdx.x % WARP;
  if (threadIdx.x == 0) Ring<C>::init(shared);
  __syncthreads();
  if (warp == C::CONSUMER_WARPS)
    DecodeLoader<D>{{p, unit, slots, shared, lane}, &k_map, &v_map}.run();
  else
    DecodeConsumer<Half, D, SOFTCAP>(p, unit, shared, warp, lane).run();
}
