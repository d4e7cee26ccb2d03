// Attention forward: persistent CTAs take Q tiles by ticket. Each Q tile is one CTA's alone and visits its KV tiles in a fixed
// order, so the bits depend on nothing but the sequence itself.
//
// Of the warps of a CTA one loads, those of the consumers compute, one per consumer stores.
#pragma once
#include "forward/consumer.cuh"
#include "forward/loader.cuh"

template <typename V> DEVICE void run_forward(const ForwardMaps& maps, const ForwardParams& p, const ModifierParams* m = nullptr) {
  using C = typename V::C;
  const u32 shared = shared_memory();
  const int warp = warp_index(), lane = threadIdx.x % WARP;
  const ForwardRole role{p, maps, shared, {shared + C::BARRIERS}, m};
  if (threadIdx.x == 0) role.bars.init<C>();
  __syncthreads();
  if (warp < 4) {
    registers_decrease<C::LOADER_REGISTERS>();
    if (warp == 0 && lane == 0) ForwardLoader<V>{role}.run();
    if (warp > 0 && warp <= C::CONSUMERS) ForwardStorer<V>{role, warp - 1, lane}.run();
  } else {
    registers_increase<C::CONSUMER_REGISTERS>();
    ForwardConsumer<V>(role, warp, lane).run();
  }
}

template <typename Half, int D, int CONSUMERS, bool SOFTCAP, MaskKind MASK, int V_DIM = D>
__global__ void __launch_bounds__(ForwardConfig<D, CONSUMERS, V_DIM>::THREADS, 1)
    attention_forward(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                      const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap out_map,
                      const __grid_constant__ ForwardParams p) {
  run_forward<ForwardVariant<Half, ForwardConfig<D, CONSUMERS, V_DIM>, SOFTCAP, MASK>>({&q_map, &k_map, &v_map, &out_map}, p);
}

// The same with dropout, ALiBi or both. Kernels of their own, so that the plain ones keep their machine code.
template <typename Half, int D, int CONSUMERS, bool SOFTCAP, MaskKind MASK, bool DROPOUT, bool ALIBI>
__global__ void __launch_bounds__(ForwardConfig<D, CONSUMERS>::THREADS, 1)
    attention_forward_modified(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                               const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap out_map,
                               const __grid_constant__ ForwardParams p, const __grid_constant__ ModifierParams m) {
  using C = ForwardConfig<D, CONSUMERS>;
  static_assert(C::SHARED_BYTES % 16 == 0 && C::SHARED_BYTES + 2 * MODIFIER_NOTE_BYTES <= MOST_SHARED_BYTES, "room for notes");
  run_forward<ForwardVariant<Half, C, SOFTCAP, MASK, DROPOUT, ALIBI>>({&q_map, &k_map, &v_map, &out_map}, p, &m);
}
