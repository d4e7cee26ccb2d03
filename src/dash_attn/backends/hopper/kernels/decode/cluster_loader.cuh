// One warp: K of this CTA's tiles, and its 16 columns of V of all tiles, by TMA, a box per page (and panel of K).
#pragma once
#include "decode/cluster_config.cuh"
#include "decode/loader.cuh"

template <int D> struct ClusterLoader {
  using C = ClusterConfig<D>;
  const DecodeParams& p;
  const TensorMap *k_map, *v_map;
  const Unit& unit;
  const CacheSlots& slots;
  u32 shared;
  int rank, lane;

  DEVICE void run() {
    const Rounds<C> rounds(unit);
    if (rounds.visits == 0) return;
    const int k_box = lane / C::PANELS, panel = lane - k_box * C::PANELS;
    const u32 k_at = panel * C::KV_PANEL + k_box * p.box_rows * PANEL_ROW, v_at = lane * p.box_rows * C::V_ROW;
    Ring<typename C::KRing> k_ring{shared};
    Ring<typename C::VRing> v_ring{shared};
    Box k_now = find(rounds, rank, k_box), v_now = find(rounds, 0, lane);
#pragma unroll 1
    for (int round = 0; rounds.tiles_of(round) > 0; round++) {
      const int tiles = rounds.tiles_of(round);
      const Box k_next = find(rounds, (round + 1) * C::CTAS + rank, k_box);
      if (rank < tiles) load(k_ring, k_map, k_now, PANEL_ROW, k_at, panel * 64);
      k_now = k_next;
#pragma unroll 1
      for (int i = 0; i < tiles; i++) {
        const Box v_next = find(rounds, round * C::CTAS + i + 1, lane);
        load(v_ring, v_map, v_now, C::V_ROW, v_at, rank * C::COLUMNS);
        v_now = v_next;
      }
    }
  }

 private:
  DEVICE Box find(const Rounds<C>& rounds, int visit, int box) {
    const bool exists = visit < rounds.visits && box * p.box_rows < C::KV_ROWS;
    return Box(p, unit, slots, rounds.first_key(visit) + box * p.box_rows, exists);
  }
  template <typename Ring> DEVICE void load(Ring& ring, const TensorMap* map, const Box& box, int row_bytes, u32 at, int column) {
    const int2 place = box.place.checked(p.cache, unit.sequence);
    const u32 bytes = box.count() * p.box_rows * row_bytes;
    ring.empty().wait(ring.phase ^ 1);
    if (lane == 0) ring.full().arrive_expect(bytes);
    __syncwarp();
    if (box.mine) tma_load<false>(ring.address() + at, map, ring.full().address, column, unit.kv_head, place.y, place.x);
    ring.next();
  }
};
