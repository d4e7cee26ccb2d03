// What the warps of a backward CTA do: one warpgroup of helpers (planner, loader, two drains: one thread each) and two warpgroups of
// consumers. With modifiers: dropout, ALiBi or both.
#pragma once
#include "backward/consumer.cuh"
#include "backward/drain.cuh"
#include "backward/loader.cuh"
#include "backward/narrow_value_consumer.cuh"
#include "backward/planner.cuh"
#include "backward/wide_consumer.cuh"

template <typename Half, int D, int DV, bool ORDERED, bool SOFTCAP, MaskKind MASK, bool RECORD, bool DROPOUT = false, bool ALIBI = false>
DEVICE void run_backward(const TensorMap& q_map, const TensorMap& k_map, const TensorMap& v_map, const TensorMap& do_map,
                         const TensorMap& dk_map, const TensorMap& dv_map, const BackwardParams& p, const ModifierParams* m = nullptr) {
  using C = BackwardConfig<D, DV>;
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
    if (warp == 0) Loader<D, DV, MASK, false, DROPOUT || ALIBI>{p, &q_map, &k_map, &v_map, &do_map, notes, bars, shared, m}.run();
    if (warp == 1) Planner<D, DV, MASK>{p, notes, bars, shared}.run();
    if (warp == 2) Drain<D, DV, ORDERED, RECORD, 0>{p, notes, bars, shared}.run();
    if (warp == 3) Drain<D, DV, ORDERED, RECORD, 1>{p, notes, bars, shared}.run();
  } else {
    registers_increase<C::CONSUMER_REGISTERS>();
    if constexpr (D <= 128)
      Consumer<Half, D, SOFTCAP, MASK, false, DROPOUT, ALIBI>(p, shared, warp, lane, m).run(&dk_map, &dv_map);
    else if constexpr (is_tall(DV))
      NarrowValueConsumer<Half, D, DV, SOFTCAP, MASK, false, DROPOUT, ALIBI>(p, shared, warp, lane, m).run(&dk_map, &dv_map);
    else if (warp < 8)
      WideConsumer<Half, D, SOFTCAP, MASK, true, false, DROPOUT, ALIBI>(p, shared, warp, lane, m).run(&dv_map);
    else
      WideConsumer<Half, D, SOFTCAP, MASK, false, false, DROPOUT, ALIBI>(p, shared, warp, lane, m).run(&dk_map);
  }
}
