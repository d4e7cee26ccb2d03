// One warp per consumer: stores its outputs by TMA, so that the consumer need not wait for them.
#pragma once
#include "forward/config.cuh"

template <typename V> struct ForwardStorer {
  using C = typename V::C;
  const TensorMap* out_map;
  u32 shared;
  ForwardBarrierHandles bars;
  int wg, lane;

  DEVICE void run() {
    tell_room();
    for (u32 tiles = 0;; tiles++) {
      const u32 slot = tiles & 1, at = shared + C::TILE_NOTES + (u32)sizeof(TileNote) * slot;
      bars.tile_full(slot).wait((tiles >> 1) & 1);
      const int4 a = load_shared_i32x4(at);
      if (a.x < 0) break;
      const int plane = load_shared_i32(at + 16);
      arrive_as_warp(bars.tile_empty(slot), lane);
      sync_with_others<OUTPUT>(wg, WARPGROUP + WARP);
      if (lane == 0) {
        for (int i = 0; i < C::V_PANELS; i++)
          tma_store<V::PACKED>(out_map, shared + C::OUT + wg * C::OUT_HALF + i * C::PANEL, i * 64, a.y, a.z + a.w + wg * 64, plane);
        bulk_commit();
        bulk_wait_read();
      }
      __syncwarp();
      if constexpr (C::OUT_OVER_Q)
        arrive_as_warp(bars.q_empty(0), lane);
      else
        tell_room();
    }
    if (lane == 0) bulk_wait();
  }

 private:
  DEVICE void tell_room() {
    if constexpr (!C::OUT_OVER_Q) arrive_for_others<ROOM>(wg, WARPGROUP + WARP);
  }
};
