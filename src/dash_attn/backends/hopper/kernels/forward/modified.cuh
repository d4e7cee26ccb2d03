// attention_forward with dropout, ALiBi or both. Kernels of their own, so that the plain ones keep their machine code.
#pragma once
#include "forward/roles.cuh"

template <typename Half, int D, int CONSUMERS, bool SOFTCAP, MaskKind MASK, bool DROPOUT, bool ALIBI>
__global__ void __launch_bounds__(ForwardConfig<D, CONSUMERS>::THREADS, 1)
    attention_forward_modified(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                               const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap out_map,
                               const __grid_constant__ ForwardParams p, const __grid_constant__ ModifierParams m) {
  using C = ForwardConfig<D, CONSUMERS>;
  static_assert(C::SHARED_BYTES % 16 == 0 && C::SHARED_BYTES + 2 * MODIFIER_NOTE_BYTES <= MOST_SHARED_BYTES, "room for notes");
  run_forward<Half, D, CONSUMERS, SOFTCAP, MASK, DROPOUT, ALIBI>(q_map, k_map, v_map, out_map, p, &m);
}
