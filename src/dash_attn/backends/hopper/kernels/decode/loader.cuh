// One warp: loads K and V by TMA, a box per page and panel (64 columns). Each lane looks up the page of its own box.
#pragma once
#include "decode/config.cuh"
#include "decode/places.cuh"

template <int D> struct DecodeLoader {
  using C = DecodeConfig<D>;
  const DecodeParams& p;
  const TensorMap *k_map, *v_map;
  const Unit& unit;
  const CacheSlots& slots;
  u32 shared;
  int lane;

  DEVICE void run() {
    const int boxes = C::KV_ROWS / p.box_rows, box = lane / C::PANELS, panel = lane - box * C::PANELS;
    Ring<C> ring{shared};
    int tile = unit.last_tile<C::KV_ROWS>();
#pragma unroll 1
    for (int left = unit.visits<C::KV_ROWS>(); left > 0; left--, tile--) {
      const int key = tile * C::KV_ROWS + box * p.box_rows;
      // Boxes that nobody attends are not loaded: their pages may be gone.
      const bool mine = box < boxes && key < unit.high && key + p.box_rows > unit.low;
      const int2 place = mine ? place_of_slot(p.cache, slots, unit.sequence, slots.first + key) : make_int2(0, 0);
      const u32 bytes = __popc(__ballot_sync(0xffffffffu, mine)) * p.box_rows * PANEL_ROW;
      const u32 at = panel * C::KV_PANEL + box * p.box_rows * PANEL_ROW;
      load(ring, k_map, mine, bytes, at, panel, place);
      load(ring, v_map, mine, bytes, at, panel, place);
    }
  }

 private:
  DEVICE void load(Ring<C>& ring, const TensorMap* map, bool mine, u32 bytes, u32 at, int panel, int2 place) {
    ring.empty().wait(ring.phase ^ 1);
    if (lane == 0) ring.full().arrive_expect(bytes);
    __syncwarp();
    if (mine) tma_load<false>(ring.address() + at, map, ring.full().address, panel * 64, unit.kv_head, place.y, place.x);
    ring.next();
  }
};
