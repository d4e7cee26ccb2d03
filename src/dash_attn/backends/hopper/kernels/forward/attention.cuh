// Attention forward: persistent CTAs take Q tiles by ticket. Each Q tile is one CTA's alone and visits its KV tiles in a fixed
// order, so the bits depend on nothing but the sequence itself.
#pragma once
#include "forward/roles.cuh"

template <typename Half, int D, int CONSUMERS, bool SOFTCAP, MaskKind MASK, int V_DIM = D>
__global__ void __launch_bounds__(ForwardConfig<D, CONSUMERS, V_DIM>::THREADS, 1)
    attention_forward(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                      const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap out_map,
                      const __grid_constant__ ForwardParams p) {
  run_forward<Half, D, CONSUMERS, SOFTCAP, MASK, false, false, V_DIM>(q_map, k_map, v_map, out_map, p);
}
