// attention_backward with dropout, ALiBi or both. Kernels of their own, so that the plain ones keep their machine code.
#pragma once
#include "backward/consumer.cuh"
#include "backward/drain.cuh"
#include "backward/loader.cuh"
#include "backward/narrow_value_consumer.cuh"
#include "backward/planner.cuh"
#include "backward/wide_consumer.cuh"

template <typename Half, int D, int DV, bool SOFTCAP, MaskKind MASK, bool DROPOUT, bool ALIBI>
__global__ void __launch_bounds__(3 * WARPGROUP, 1)
    attention_backward_modified(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                                const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap do_map,
                                const __grid_constant__ TensorMap dk_map, const __grid_constant__ TensorMap dv_map,
                                const __grid_constant__ BackwardParams p, const __grid_constant__ ModifierParams m) {
  using C = BackwardConfig<D, DV>;
  static_assert(C::SHARED_BYTES % 16 == 0 && C::SHARED_BYTES + STAGES * MODIFIER_NOTE_BYTES <= MOST_SHARED_BYTES, "room for notes");
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  if (shared & 1023) __trap();  // the swizzle pattern needs 1024-byte alignment
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP;
  if (threadIdx.x == 0) Barriers<C>{shared}.init();
  __syncthreads();
  await_kernel_before();  // the preprocess
  allow_next_kernel();    // the postprocess: its blocks run where CTAs of this kernel have ended

  if (warp < 4) {
    registers_decrease<C::HELPER_REGISTERS>();
    const Notes<C> notes{shared};
    const Barriers<C> bars{shared};
    if (lane != 0) return;
    if (warp == 0) Loader<D, DV, MASK, false, true>{p, &q_map, &k_map, &v_map, &do_map, notes, bars, shared, &m}.run();
    if (warp == 1) Planner<D, DV, MASK>{p, notes, bars, shared}.run();
    if (warp == 2) Drain<D, DV, true, false, 0>{p, notes, bars, shared}.run();
    if (warp == 3) Drain<D, DV, true, false, 1>{p, notes, bars, shared}.run();
  } else {
    registers_increase<C::CONSUMER_REGISTERS>();
    if constexpr (D <= 128)
      Consumer<Half, D, SOFTCAP, MASK, false, DROPOUT, ALIBI>(p, shared, warp, lane, &m).run(&dk_map, &dv_map);
    else if constexpr (is_tall(DV))
      NarrowValueConsumer<Half, D, DV, SOFTCAP, MASK, false, DROPOUT, ALIBI>(p, shared, warp, lane, &m).run(&dk_map, &dv_map);
    else if (warp < 8)
      WideConsumer<Half, D, SOFTCAP, MASK, true, false, DROPOUT, ALIBI>(p, shared, warp, lane, &m).run(&dv_map);
    else
      WideConsumer<Half, D, SOFTCAP, MASK, false, false, DROPOUT, ALIBI>(p, shared, warp, lane, &m).run(&dk_map);
  }
}
