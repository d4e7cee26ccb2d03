// One thread: takes Q tiles by ticket and loads Q, K and V by TMA.
#pragma once
#include "forward_config.cuh"

template <int D, int CONSUMERS> struct ForwardLoader {
  using C = ForwardConfig<D, CONSUMERS>;
  const ForwardParams& p;
  const TensorMap *q_map, *k_map, *v_map;
  u32 shared, bar;

  DEVICE void run() {
    using namespace forward_barrier;
    u32 loads = 0;  // KV tiles so far
    int2 next = take_ticket();
    for (u32 tiles = 0;; tiles++) {
      const u32 slot = tiles & 1;
      const TileNote tile{next.x, next.y, next.x < 0 ? -1 : p.visits.visits[next.y]};
      mbarrier_wait(bar + TILE_EMPTY + 8 * slot, ((tiles >> 1) & 1) ^ 1);
      store_shared_i32x4(shared + C::TILE_NOTES + 16 * slot, make_int4(tile.head_of_batch, tile.q_tile, tile.visits, 0));
      mbarrier_arrive(bar + TILE_FULL + 8 * slot);
      if (tile.visits < 0) return;
      const int sequence = tile.head_of_batch / p.q_heads, head = tile.head_of_batch - sequence * p.q_heads, kv_head = head / p.group;
      load_q(tiles, tile.q_tile, head, sequence);
      Visits visits(p.visits, tile.q_tile);
#pragma unroll 1
      for (int j = 0; j < tile.visits; j++, loads++) {
        visits.next();
        load_kv(C::K, k_map, K_FULL, loads, visits, kv_head, sequence);
        load_kv(C::V, v_map, V_FULL, loads, visits, kv_head, sequence);
        if (j == 1) next = take_ticket();  // both stages are on their way: its latency hides behind them
      }
      if (tile.visits < 2) next = take_ticket();
    }
  }

 private:
  // The next (head of the batch, Q tile), or -1. Groups of heads whose K and V stay in the L2 cache; in a group longest Q
  // tiles first, heads innermost.
  DEVICE int2 take_ticket() {
    const int ticket = atomicAdd(p.next_ticket, 1);
    if (ticket >= p.tickets) return make_int2(-1, 0);
    const int side = p.heads_side_by_side, group = ticket / (side * p.places), within = ticket - group * side * p.places;
    const int width = min(side, p.batch * p.q_heads - group * side), place = within / width;
    return make_int2(group * side + within - place * width, p.visits.q_order[place]);
  }

  DEVICE void load_q(u32 number, int q_tile, int head, int sequence) {
    const u32 s = number & 1, full = bar + forward_barrier::Q_FULL + 8 * s;
    mbarrier_wait(bar + forward_barrier::Q_EMPTY + 8 * s, ((number >> 1) & 1) ^ 1);
    mbarrier_arrive_expect(full, C::Q_BYTES);
    for (int half = 0; half < CONSUMERS; half++)
      for (int i = 0; i < C::PANELS; i++)
        tma_load(shared + C::Q + s * C::Q_BYTES + half * C::HALF_BYTES + i * C::PANEL, q_map, full, i * 64, head,
                 q_tile * C::Q_ROWS + half * 64, sequence);
  }

  DEVICE void load_kv(int at, const TensorMap* map, int full, u32 number, const Visits& visits, int kv_head, int sequence) {
    using namespace forward_barrier;
    constexpr int EMPTY_BEHIND_FULL = K_EMPTY - K_FULL;
    static_assert(EMPTY_BEHIND_FULL == V_EMPTY - V_FULL, "barriers of K and V are laid out alike");
    const u32 s = number & 1, phase = (number >> 1) & 1;
    mbarrier_wait(bar + full + EMPTY_BEHIND_FULL + 8 * s, phase ^ 1);
    if (at == C::K) store_shared_i32(shared + C::VISIT_NOTES + 4 * s, VisitNote::pack(visits.kv_tile, visits.partial).word);
    mbarrier_arrive_expect(bar + full + 8 * s, C::KV_BYTES);
    for (int i = 0; i < C::PANELS; i++)
      tma_load(shared + at + s * C::KV_BYTES + i * C::KV_PANEL, map, bar + full + 8 * s, i * 64, kv_head, visits.kv_tile * C::KV_ROWS, sequence);
  }
};
