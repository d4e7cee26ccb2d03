// Attention backward: persistent CTAs that take chains by ticket. The kernels walk any plan and know no schedule by name.
//
// A CTA has one warpgroup of helpers (planner, loader, two drains: one thread each) and two warpgroups of consumers.
#pragma once
#include "backward/consumer.cuh"
#include "backward/drain.cuh"
#include "backward/loader.cuh"
#include "backward/narrow_value_consumer.cuh"
#include "backward/planner.cuh"
#include "backward/wide_consumer.cuh"

template <typename V> DEVICE void run_consumer(const Role<V>& role, int warp, int lane, const BackwardMaps& maps) {
  if constexpr (V::D <= 128)
    Consumer<V>(role, warp, lane).run(maps);
  else if constexpr (is_tall(V::DV))
    NarrowValueConsumer<V>(role, warp, lane).run(maps);
  else if (warp < 8)
    WideConsumer<V, true>(role, warp, lane).run(maps.dv);
  else
    WideConsumer<V, false>(role, warp, lane).run(maps.dk);
}

template <typename V> DEVICE void run_backward(const BackwardMaps& maps, const BackwardParams& p, const typename V::More* more = nullptr) {
  using C = typename V::C;
  const u32 shared = shared_memory();
  const int warp = warp_index(), lane = threadIdx.x % WARP;
  if (threadIdx.x == 0) Barriers<C>{shared}.init();
  __syncthreads();
  if constexpr (V::LEGS) {
    if (!more->overlaps) await_kernel_before();  // whatever brought the states
  } else {
    await_kernel_before();  // the preprocess
  }
  allow_next_kernel();  // the postprocess: its blocks run where CTAs of this kernel have ended

  const Role<V> role{p, shared, more};
  if (warp < 4) {
    registers_decrease<C::HELPER_REGISTERS>();
    if (lane != 0) return;
    if (warp == 0) Loader<V>{role, maps}.run();
    if (warp == 1) Planner<V>{role}.run();
    if (warp == 2) Drain<V, 0>{role}.run();
    if (warp == 3) Drain<V, 1>{role}.run();
    if constexpr (V::LEGS) {
      const int overlaps = more->overlaps;
      if (warp == 1 && overlaps && blockIdx.x == 0) await_kernel_before();  // launches end one after the other
    }
  } else {
    registers_increase<C::CONSUMER_REGISTERS>();
    run_consumer(role, warp, lane, maps);
  }
}

template <typename Half, int D, int DV, bool ORDERED, bool SOFTCAP, MaskKind MASK, bool RECORD = false>
__global__ void __launch_bounds__(3 * WARPGROUP, 1)
    attention_backward(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                       const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap do_map,
                       const __grid_constant__ TensorMap dk_map, const __grid_constant__ TensorMap dv_map,
                       const __grid_constant__ BackwardParams p) {
  run_backward<Plain<BackwardVariant<Half, D, DV, SOFTCAP, MASK>, ORDERED, RECORD>>({&q_map, &k_map, &v_map, &do_map, &dk_map, &dv_map}, p);
}

// The same with dropout, ALiBi or both. Kernels of their own, so that the plain ones keep their machine code.
template <typename Half, int D, int DV, bool SOFTCAP, MaskKind MASK, bool DROPOUT, bool ALIBI>
__global__ void __launch_bounds__(3 * WARPGROUP, 1)
    attention_backward_modified(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                                const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap do_map,
                                const __grid_constant__ TensorMap dk_map, const __grid_constant__ TensorMap dv_map,
                                const __grid_constant__ BackwardParams p, const __grid_constant__ ModifierParams m) {
  using V = Modified<BackwardVariant<Half, D, DV, SOFTCAP, MASK>, DROPOUT, ALIBI>;
  static_assert(V::C::SHARED_BYTES % 16 == 0 && V::C::SHARED_BYTES + STAGES * MODIFIER_NOTE_BYTES <= MOST_SHARED_BYTES, "room for notes");
  run_backward<V>({&q_map, &k_map, &v_map, &do_map, &dk_map, &dv_map}, p, &m);
}

// Legs of walks, where a sequence is shared by ranks: stretches of chains whose dK and dV are kept in memory before and behind them, as
// states, as the consumers have them in registers. Semaphores and dQ live through all launches of a rank.
//
// Launches may overlap. CTAs of a launch start when all those of the one before have started, on SMs that are free; semaphores tell
// them which turns have landed and which states have been stored. Nothing waits in a circle: no launch waits for a later one.
template <typename Half, int D, int DV, bool SOFTCAP, MaskKind MASK> __global__ void __launch_bounds__(3 * WARPGROUP, 1)
    attention_backward_of_legs(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                               const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap do_map,
                               const __grid_constant__ BackwardParams p, const __grid_constant__ LegParams legs) {
  run_backward<OfLegs<BackwardVariant<Half, D, DV, SOFTCAP, MASK>>>({&q_map, &k_map, &v_map, &do_map, nullptr, nullptr}, p, &legs);
}
