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
    if (ABLATE & 4) return;
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
      STAMP(2, round, 0)
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
    if (ABLATE & 2) return;
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
        STAMP(3, visit + i, 0)
        if (lane == 0) ring.full().arrive_expect(bytes);
        __syncwarp();
        if (now[i].mine)
          tma_load<false>(ring.address() + at, v_map, ring.full().address, rank * C::COLUMNS, unit.kv_head, place.y, place.x);
        STAMP(3, visit + i, 1)
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

// Four warps in turns, 16 bytes per thread and copy.
template <typename C> struct ClusterValuesByThreads {
  static constexpr int CHUNKS = C::COLUMNS / 8, ROWS = WARP / CHUNKS, AHEAD = (C::V_SLOTS - 1) / 4;
  const DecodeParams& p;
  const Unit& unit;
  const CacheSlots& slots;
  u32 shared;
  int rank, index, lane;

  DEVICE void run() {
    if (ABLATE & 2) return;
    const Rounds<C> rounds(unit);
    int under_way = 0, visit = index;
    if (visit >= rounds.visits) return;
    PlaceOfSlot now = find(rounds, visit);
#pragma unroll 1
    for (; visit < rounds.visits; visit += 4) {
      const PlaceOfSlot next = find(rounds, visit + 4 < rounds.visits ? visit + 4 : visit);
      const u32 slot = visit % C::V_SLOTS, phase = visit / C::V_SLOTS & 1;
      barrier(C::VRing::EMPTY, slot).wait(phase ^ 1);
      STAMP(3, visit, 0)
      copy(rounds.first_key(visit), slot, now.checked(p.cache, unit.sequence));
      cp_async_commit();
      STAMP(3, visit, 1)
      if (under_way == AHEAD) {
        cp_async_wait<AHEAD>();
        arrive(visit - 4 * AHEAD);
      } else {
        under_way++;
      }
      now = next;
    }
    cp_async_wait<0>();
    for (; under_way > 0; under_way--) arrive(visit - 4 * under_way);
  }

 private:
  DEVICE Barrier barrier(int kind, u32 slot) const { return {shared + kind + 8 * slot}; }
  DEVICE void arrive(int visit) {
    fence_async_shared();
    __syncwarp();
    if (lane == 0) barrier(C::VRing::FULL, visit % C::V_SLOTS).arrive();
  }
  // Lane i looks up the i-th 16 rows of a tile.
  DEVICE PlaceOfSlot find(const Rounds<C>& rounds, int visit) {
    const int key = rounds.first_key(visit) + lane * 16;
    const bool exists = lane * 16 < C::KV_ROWS && key < unit.high && key + 16 > unit.low;
    return PlaceOfSlot(p.cache, slots, unit.sequence, slots.origin + (exists ? max(key, slots.position) : unit.low));
  }
  DEVICE void copy(int start, u32 slot, int2 place) {
    const int chunk = lane % CHUNKS, column = rank * C::COLUMNS + chunk * 8;
    const short* const values = static_cast<const short*>(p.v_cache) + unit.kv_head * p.v_strides[2] + column;
    const u32 to = shared + C::V + slot * C::V_BYTES;
    const int low = max(unit.low, slots.position);
#pragma unroll
    for (int i = 0; i < C::KV_ROWS / ROWS; i++) {
      const int group = i * ROWS / 16, row = i * ROWS + lane / CHUNKS, key = start + row;
      const int page = __shfl_sync(0xffffffffu, place.x, group), first = __shfl_sync(0xffffffffu, place.y, group);
      const int from = max(start + 16 * group, slots.position);
      const bool loads = key >= low && key < unit.high && column < p.v_dim;
      const short* const source = values + (loads ? page * p.v_strides[0] + (first + key - from) * p.v_strides[1] : 0);
      const u32 swizzle = CHUNKS == 2 ? (row >> 2) & 1 : CHUNKS == 4 ? (row >> 1) & 3 : row & 7;
      cp_async(to + row * C::V_ROW + ((chunk ^ swizzle) * 16), loads ? source : static_cast<const short*>(p.v_cache), loads ? 16 : 0);
    }
  }
};
