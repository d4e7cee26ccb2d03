// One thread: takes Q tiles by ticket and loads Q, K and V by TMA.
#pragma once
#include "forward_config.cuh"

template <int D> struct ForwardLoader {
  using C = ForwardConfig<D>;
  const ForwardParams& p;
  const TensorMap *q_map, *k_map, *v_map;
  u32 shared, bar;

  DEVICE void run() {
    using namespace forward_barrier;
    u32 loads = 0;  // KV tiles so far
    for (u32 tiles = 0, q_loads = 0;; tiles++) {
      const u32 slot = tiles & 1;
      const int ticket = atomicAdd(p.next_ticket, 1);
      mbarrier_wait(bar + TILE_EMPTY + 8 * slot, ((tiles >> 1) & 1) ^ 1);
      const TileNote tile = ticket < p.tickets ? tile_of_ticket(ticket) : TileNote{0, 0, 0, -1};
      store_shared_i32x4(shared + C::NOTE + 16 * slot, make_int4(tile.sequence, tile.head, tile.q_tile, tile.visits));
      mbarrier_arrive(bar + TILE_FULL + 8 * slot);
      if (tile.visits < 0) return;
      if (tile.visits == 0) continue;
      mbarrier_wait(bar + Q_EMPTY, (q_loads++ & 1) ^ 1);
      mbarrier_arrive_expect(bar + Q_FULL, C::Q_BYTES);
      for (int half = 0; half < C::CONSUMERS; half++)
        for (int i = 0; i < C::PANELS; i++)
          tma_load(shared + C::Q + half * C::HALF_BYTES + i * C::PANEL, q_map, bar + Q_FULL, i * 64, tile.head,
                   tile.q_tile * C::Q_ROWS + half * 64, tile.sequence);
      Visits visits(p.visits, tile.q_tile);
#pragma unroll 1
      for (int j = 0; j < tile.visits; j++, loads++) {
        visits.next();
        load(C::K, k_map, K_FULL, loads, visits.kv_tile, tile);
        load(C::V, v_map, V_FULL, loads, visits.kv_tile, tile);
      }
    }
  }

 private:
  DEVICE TileNote tile_of_ticket(int ticket) {
    // Groups of heads whose K and V stay in the L2 cache; in a group longest Q tiles first, heads innermost.
    const int side = p.heads_side_by_side, all_heads = p.batch * p.q_heads;
    const int group = ticket / (side * p.q_tiles), within = ticket - group * side * p.q_tiles;
    const int width = min(side, all_heads - group * side), place = within / width;
    const int head_of_batch = group * side + within - place * width, sequence = head_of_batch / p.q_heads;
    const int q_tile = p.visits.q_order[place];
    return {sequence, head_of_batch - sequence * p.q_heads, q_tile, p.visits.visits[q_tile]};
  }

  DEVICE void load(int at, const TensorMap* map, int full, u32 number, int kv_tile, const TileNote& tile) {
    constexpr int EMPTY_BEHIND_FULL = forward_barrier::K_EMPTY - forward_barrier::K_FULL;
    const u32 s = number & 1, phase = (number >> 1) & 1;
    mbarrier_wait(bar + full + EMPTY_BEHIND_FULL + 8 * s, phase ^ 1);
    mbarrier_arrive_expect(bar + full + 8 * s, C::KV_BYTES);
    for (int i = 0; i < C::PANELS; i++)
      tma_load(shared + at + s * C::KV_BYTES + i * C::KV_PANEL, map, bar + full + 8 * s, i * 64, tile.head / p.group,
               kv_tile * C::KV_ROWS, tile.sequence);
  }
};
