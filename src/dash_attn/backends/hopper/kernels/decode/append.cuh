// New keys and values go behind those of their sequence. A row or page that two sequences append to stops the kernel.
#pragma once
#include "decode/places.cuh"

// One block per new token.
__global__ void __launch_bounds__(128) append_to_cache(const __grid_constant__ AppendParams p) {
  const int sequence = blockIdx.x / p.cache.added, token = blockIdx.x - sequence * p.cache.added;
  const CacheSlots slots(p.cache, sequence);
  const int slot = slots.length + token;
  const int2 place = PlaceOfSlot(p.cache, slots, sequence, slot).checked(p.cache, sequence);
  if (threadIdx.x == 0 && p.owners != nullptr) {
    const int owner = 1 + (p.cache.pages == nullptr ? sequence : sequence * p.entries + slot / p.cache.page_size);
    const int before = atomicCAS(p.owners + place.x, 0, owner);
    if (before != 0 && before != owner) report_and_trap(p.cache.report, Trouble::CacheShared, p.cache.call, sequence, place.x);
  }
#pragma unroll
  for (int which = 0; which < 2; which++) {
    const int chunks = p.dims[which] / 8, all = p.kv_heads * chunks;  // of 16 bytes
    const i64* const to = which ? p.v_cache_strides : p.k_cache_strides;
    const i64* const from = which ? p.v_strides : p.k_strides;
    for (int i = threadIdx.x; i < all; i += 128) {
      const int head = i / chunks, column = (i - head * chunks) * 8;
      const short* source = static_cast<const short*>(which ? p.v : p.k) + sequence * from[0] + token * from[1] + head * from[2] + column;
      short* target = static_cast<short*>(which ? p.v_cache : p.k_cache) + place.x * to[0] + place.y * to[1] + head * to[2] + column;
      *reinterpret_cast<int4*>(target) = *reinterpret_cast<const int4*>(source);
    }
  }
}
