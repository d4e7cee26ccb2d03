// Legs of walks, where a sequence is shared by devices: attention_backward for stretches of chains whose dK and dV are kept in memory
// before and behind them, as states, as the consumers have them in registers. Semaphores and dQ live through all launches of a device.
//
// Launches may overlap. CTAs of a launch start when all those of the one before have started, on SMs that are free; semaphores tell
// them which turns have landed and which states have been stored. Nothing waits in a circle: no launch waits for a later one.
#pragma once
#include "backward/consumer.cuh"
#include "backward/drain.cuh"
#include "backward/loader.cuh"
#include "backward/narrow_value_consumer.cuh"
#include "backward/planner.cuh"
#include "backward/wide_consumer.cuh"

template <typename Half, int D, int DV, bool SOFTCAP, MaskKind MASK> __global__ void __launch_bounds__(3 * WARPGROUP, 1)
    attention_backward_of_legs(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                               const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap do_map,
                               const __grid_constant__ BackwardParams p, const __grid_constant__ LegParams legs) {
  using C = BackwardConfig<D, DV>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  if (shared & 1023) __trap();  // the swizzle pattern needs 1024-byte alignment
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP;
  if (threadIdx.x == 0) Barriers<C>{shared}.init();
  __syncthreads();
  if (!legs.overlaps) await_kernel_before();  // the preprocess, or whatever brought the states
  allow_next_kernel();

  if (warp < 4) {
    registers_decrease<C::HELPER_REGISTERS>();
    const Notes<C> notes{shared};
    const Barriers<C> bars{shared};
    if (lane != 0) return;
    if (warp == 0) Loader<D, DV, MASK, true>{p, &q_map, &k_map, &v_map, &do_map, notes, bars, shared, &legs}.run();
    if (warp == 1) Planner<D, DV, MASK, true>{p, notes, bars, shared, &legs}.run();
    if (warp == 2) Drain<D, DV, true, false, 0, true>{p, notes, bars, shared}.run();
    if (warp == 3) Drain<D, DV, true, false, 1, true>{p, notes, bars, shared}.run();
    if (warp == 1 && legs.overlaps && blockIdx.x == 0) await_kernel_before();  // launches end one after the other
  } else {
    registers_increase<C::CONSUMER_REGISTERS>();
    if constexpr (D <= 128)
      Consumer<Half, D, SOFTCAP, MASK, true>(p, shared, warp, lane).run(nullptr, nullptr, &legs);
    else if constexpr (is_tall(DV))
      NarrowValueConsumer<Half, D, DV, SOFTCAP, MASK, true>(p, shared, warp, lane).run(nullptr, nullptr, &legs);
    else if (warp < 8)
      WideConsumer<Half, D, SOFTCAP, MASK, true, true>(p, shared, warp, lane).run(nullptr, &legs);
    else
      WideConsumer<Half, D, SOFTCAP, MASK, false, true>(p, shared, warp, lane).run(nullptr, &legs);
  }
}
