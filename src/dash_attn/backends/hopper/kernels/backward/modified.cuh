// attention_backward with dropout, ALiBi or both. Kernels of their own, so that the plain ones keep their machine code.
#pragma once
#include "backward/roles.cuh"

template <typename Half, int D, int DV, bool SOFTCAP, MaskKind MASK, bool DROPOUT, bool ALIBI>
__global__ void __launch_bounds__(3 * WARPGROUP, 1)
    attention_backward_modified(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                                const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap do_map,
                                const __grid_constant__ TensorMap dk_map, const __grid_constant__ TensorMap dv_map,
                                const __grid_constant__ BackwardParams p, const __grid_constant__ ModifierParams m) {
  using C = BackwardConfig<D, DV>;
  static_assert(C::SHARED_BYTES % 16 == 0 && C::SHARED_BYTES + STAGES * MODIFIER_NOTE_BYTES <= MOST_SHARED_BYTES, "room for notes");
  run_backward<Half, D, DV, true, SOFTCAP, MASK, false, DROPOUT, ALIBI>(q_map, k_map, v_map, do_map, dk_map, dv_map, p, &m);
}
