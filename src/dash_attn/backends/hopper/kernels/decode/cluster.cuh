// Attention to a cache: one cluster per unit (decode/cluster_config.cuh).
#pragma once
#include "decode/cluster_loader.cuh"
#include "decode/cluster_outputs.cuh"
#include "decode/cluster_scores.cuh"

template <typename Half, int D, int COLUMNS, bool SOFTCAP> __global__ void __cluster_dims__(ClusterConfig<D, COLUMNS>::CTAS, 1, 1)
    __launch_bounds__(ClusterConfig<D, COLUMNS>::THREADS, 1)
        attention_decode_cluster(const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
                                 const __grid_constant__ DecodeParams p) {
  using C = ClusterConfig<D, COLUMNS>;
  const u32 shared = shared_memory();
  Unit unit(p, blockIdx.x / C::CTAS, C::ROWS);
  if (!unit.has_rows()) return;  // the whole cluster
  const CacheSlots slots(p.cache, unit.sequence);
  unit.look_at_keys(p, slots);
  const int warp = warp_index(), lane = threadIdx.x % WARP, place = (int)place_in_cluster();
  if (threadIdx.x == 0) {
    Ring<typename C::KRing>::init(shared);
    Ring<typename C::VRing>::init(shared);
    Mail<C>{shared}.init(Rounds<C>(unit), place);
  }
  cluster_sync();  // nobody sends to barriers that are not there yet
  if (warp < 4)
    ClusterScores<Half, C, SOFTCAP, 0>({p, unit, shared, place, warp, lane}).run();
  else if (warp < 8)
    ClusterOutputs<Half, C>({p, unit, shared, place, warp - 4, lane}).run();
  else if (warp < C::FIRST_LOADER)
    ClusterScores<Half, C, SOFTCAP, 1>({p, unit, shared, place, warp - 8, lane}).run();
  else if (warp == C::FIRST_LOADER)
    ClusterKeys<C>{{p, unit, slots, shared, lane}, &k_map, place}.run();
  else if (warp == C::FIRST_LOADER + 1)
    ClusterSums<C>{unit, {shared}, lane}.run();
  else
    ClusterValues<C>{{p, unit, slots, shared, lane}, &v_map, place, warp - C::FIRST_LOADER - 2}.run();
  __syncwarp();
  cluster_sync();  // nobody leaves while others still read from it or write to it
}
