// Attention backward: persistent CTAs that take chains by ticket. The kernel walks any plan and knows no schedule by name.
#pragma once
#include "backward/roles.cuh"

template <typename Half, int D, int DV, bool ORDERED, bool SOFTCAP, MaskKind MASK, bool RECORD = false>
__global__ void __launch_bounds__(3 * WARPGROUP, 1)
    attention_backward(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                       const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap do_map,
                       const __grid_constant__ TensorMap dk_map, const __grid_constant__ TensorMap dv_map,
                       const __grid_constant__ BackwardParams p) {
  run_backward<Half, D, DV, ORDERED, SOFTCAP, MASK, RECORD>(q_map, k_map, v_map, do_map, dk_map, dv_map, p);
}
