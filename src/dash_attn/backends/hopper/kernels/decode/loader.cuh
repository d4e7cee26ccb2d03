// One warp: loads K and V by TMA, a box per page and panel (64 columns). Each lane looks up the page of its own box.
#pragma once
#include "decode/config.cuh"
#include "decode/places.cuh"

// The box of a KV tile that a lane loads. Boxes that nobody attends are not loaded: their pages may be gone.
struct Box {
  bool mine;
  PlaceOfSlot place;

  DEVICE Box(const DecodeParams& p, const Unit& unit, const CacheSlots& slots, int key, bool exists)
      : mine(exists && key < unit.high && key + p.box_rows > unit.low),
        place(p.cache, slots, unit.sequence, slots.origin + (mine ? key : unit.low)) {}
  DEVICE u32 count() const { return __popc(__ballot_sync(0xffffffffu, mine)); }
};

// A warp that loads boxes into a ring.
struct BoxLoader {
  const DecodeParams& p;
  const Unit& unit;
  const CacheSlots& slots;
  u32 shared;
  int lane;

  // Boxes of COLUMNS columns. `at`: of this lane's box in a slot. `bytes`: of all boxes.
  template <int COLUMNS, typename C>
  DEVICE void load(Ring<C>& ring, const TensorMap* map, bool mine, u32 bytes, u32 at, int panel, int2 place) {
    ring.empty().wait(ring.phase ^ 1);
    if (lane == 0) ring.full().arrive_expect(bytes);
    __syncwarp();
    if (mine) tma_load<false>(ring.address() + at, map, ring.full().address, panel * COLUMNS, unit.kv_head, place.y, place.x);
    ring.next();
  }
};

template <int D> struct DecodeLoader : BoxLoader {
  using C = DecodeConfig<D>;
  const TensorMap *k_map, *v_map;

  DEVICE void run() {
    const int box = lane / C::PANELS, panel = lane - box * C::PANELS;
    const u32 at = panel * C::KV_PANEL + box * p.box_rows * PANEL_ROW;
    Ring<C> ring{shared};
    int left = unit.visits<C::KV_ROWS>(), key = unit.last_tile<C::KV_ROWS>() * C::KV_ROWS + box * p.box_rows;
    if (left == 0) return;
    Box now = find(key, box);
#pragma unroll 1
    for (; left > 0; left--) {
      key -= C::KV_ROWS;
      const Box next = find(key, left > 1 ? box : C::KV_ROWS);
      const int2 place = now.place.checked(p.cache, unit.sequence);
      const u32 bytes = now.count() * p.box_rows * PANEL_ROW;
      load<64>(ring, k_map, now.mine, bytes, at, panel, place);
      load<64>(ring, v_map, now.mine, bytes, at, panel, place);
      now = next;
    }
  }

 private:
  DEVICE Box find(int key, int box) { return Box(p, unit, slots, key, box * p.box_rows < C::KV_ROWS); }
};
