// Warps that load: one K of this CTA's tiles, one its columns of V of all tiles, by TMA, a box per page (and panel of K).
#pragma once
#include "decode/cluster_config.cuh"
#include "decode/loader.cuh"

template <typename C> struct ClusterKeys {
  const DecodeParams& p;
  const TensorMap* k_map;
  const Unit& unit;
  const CacheSlots& slots;
  u32 shared;
  int rank, lane;

  DEVICE void run() {
    const Rounds<C> rounds(unit);
    const int index = lane / C::PANELS, panel = lane - index * C::PANELS;
    const u32 at = panel * C::KV_PANEL + index * p.box_rows * PANEL_ROW;
    Ring<typename C::KRing> ring{shared};
    if (rank >= rounds.visits) return;
    Box now = find(rounds, 0, index);
#pragma unroll 1
    for (int round = 0; rank < rounds.tiles_of(round); round++) {
      const Box next = find(rounds, round + 1, index);
      const int2 place = now.place.checked(p.cache, unit.sequence);
      const u32 bytes = now.count() * p.box_rows * PANEL_ROW;
      ring.empty().wait(ring.phase ^ 1);
      if (lane == 0) ring.full().arrive_expect(bytes);
      __syncwarp();
      if (now.mine) tma_load<false>(ring.address() + at, k_map, ring.full().address, panel * 64, unit.kv_head, place.y, place.x);
      ring.next();
      now = next;
    }
  }

 private:
  DEVICE Box find(const Rounds<C>& rounds, int round, int index) {
    const bool exists = rank < rounds.tiles_of(round) && index * p.box_rows < C::KV_ROWS;
    return Box(p, unit, slots, rounds.first_key(round * C::CTAS + rank) + index * p.box_rows, exists);
  }
};

template <typename C> struct ClusterValues {
  static constexpr int TILES = 4;  // whose pages are looked up together, while those before are loaded
  const DecodeParams& p;
  const TensorMap* v_map;
  const Unit& unit;
  const CacheSlots& slots;
  u32 shared;
  int rank, lane;

  DEVICE void run() {
    const Rounds<C> rounds(unit);
    const u32 at = lane * p.box_rows * C::V_ROW;
    Ring<typename C::VRing> ring{shared};
    if (rounds.visits == 0) return;
    Box now[TILES] = {find(rounds, 0), find(rounds, 1), find(rounds, 2), find(rounds, 3)};
#pragma unroll 1
    for (int visit = 0; visit < rounds.visits; visit += TILES) {
      Box next[TILES] = {find(rounds, visit + 4), find(rounds, visit + 5), find(rounds, visit + 6), find(rounds, visit + 7)};
#pragma unroll
      for (int i = 0; i < TILES; i++) {
        if (visit + i >= rounds.visits) break;
        const int2 place = now[i].place.checked(p.cache, unit.sequence);
        const u32 bytes = now[i].count() * p.box_rows * C::V_ROW;
        ring.empty().wait(ring.phase ^ 1);
        if (lane == 0) ring.full().arrive_expect(bytes);
        __syncwarp();
        if (now[i].mine)
          tma_load<false>(ring.address() + at, v_map, ring.full().address, rank * C::COLUMNS, unit.kv_head, place.y, place.x);
        ring.next();
      }
#pragma unroll
      for (int i = 0; i < TILES; i++) now[i] = next[i];
    }
  }

 private:
  DEVICE Box find(const Rounds<C>& rounds, int visit) {
    const bool exists = visit < rounds.visits && lane * p.box_rows < C::KV_ROWS;
    return Box(p, unit, slots, rounds.first_key(visit) + lane * p.box_rows, exists);
  }
};
