// Warps that load: one K of this CTA's tiles, others its columns of V of all tiles, by TMA, a box per page (and panel of K).
#pragma once
#include "decode/cluster_config.cuh"
#include "decode/loader.cuh"

template <typename C> struct ClusterKeys : BoxLoader {
  const TensorMap* k_map;
  int place;

  DEVICE void run() {
    const Rounds<C> rounds(unit);
    const int index = lane / C::PANELS, panel = lane - index * C::PANELS;
    const u32 at = panel * C::KV_PANEL + index * p.box_rows * PANEL_ROW;
    Ring<typename C::KRing> ring{shared};
    if (place >= rounds.visits) return;
    Box now = find(rounds, 0, index);
#pragma unroll 1
    for (int round = 0; place < rounds.tiles_of(round); round++) {
      const Box next = find(rounds, round + 1, index);
      const int2 at_page = now.place.checked(p.cache, unit.sequence);
      const u32 bytes = now.count() * p.box_rows * PANEL_ROW;
      load<64>(ring, k_map, now.mine, bytes, at, panel, at_page);
      now = next;
    }
  }

 private:
  DEVICE Box find(const Rounds<C>& rounds, int round, int index) {
    const bool exists = place < rounds.tiles_of(round) && index * p.box_rows < C::KV_ROWS;
    return Box(p, unit, slots, rounds.first_key(round * C::CTAS + place) + index * p.box_rows, exists);
  }
};

// Lanes issue their boxes one after the other, which takes longer than a tile may where pages are small: so these warps take turns.
template <typename C> struct ClusterValues : BoxLoader {
  const TensorMap* v_map;
  int place, first;

  DEVICE void run() {
    const Rounds<C> rounds(unit);
    const u32 at = lane * p.box_rows * C::V_ROW;
    Ring<typename C::VRing> ring{shared, (u32)first};
    if (first >= rounds.visits) return;
    Box now = find(rounds, first);
#pragma unroll 1
    for (int visit = first; visit < rounds.visits; visit += C::V_WARPS) {
      const Box next = find(rounds, visit + C::V_WARPS);
      const int2 at_page = now.place.checked(p.cache, unit.sequence);
      const u32 bytes = now.count() * p.box_rows * C::V_ROW;
      load<C::COLUMNS>(ring, v_map, now.mine, bytes, at, place, at_page);
#pragma unroll
      for (int i = 1; i < C::V_WARPS; i++) ring.next();
      now = next;
    }
  }

 private:
  DEVICE Box find(const Rounds<C>& rounds, int visit) {
    const bool exists = visit < rounds.visits && lane * p.box_rows < C::KV_ROWS;
    return Box(p, unit, slots, rounds.first_key(visit) + lane * p.box_rows, exists);
  }
};
