// Attention to a cache of keys and values, for few queries: tiles, shared memory and barriers.
//
// A unit is a sequence, a KV head and 64 rows; a row is a query of one of the query heads that share the KV head, so K and V are read
// once for all of them. One CTA serves a unit: a warp loads K and V into a ring of slots, a warpgroup computes. The arithmetic of a row
// is the forward's (forward/consumer.cuh): the same products on the same KV tiles, counted from the sequence's first key, visited
// downward, with the same softmax. Rows of a product do not meet, so which rows lie beside each other does not matter.
#pragma once
#include "common/cta.cuh"

template <int D_> struct DecodeConfig {
  static constexpr int D = D_, KV_ROWS = forward_kv_rows(D), ROWS = 64;
  static constexpr int CONSUMER_WARPS = 4, THREADS = WARPGROUP + WARP;
  static constexpr int PANELS = (D + 63) / 64, PANEL = HALF_PANEL, KV_PANEL = KV_ROWS * PANEL_ROW;
  static constexpr int Q_BYTES = PANELS * PANEL, KV_BYTES = PANELS * KV_PANEL;
  static constexpr int SCORES = KV_ROWS / 2, OUTPUTS = D / 2;  // registers of S and O
  // Two CTAs hide each other's softmax where their memory suffices for bytes in flight. A slot is a tile of K or of V.
  static constexpr int CTAS = D <= 128 ? 2 : 1, SLOTS = D <= 64 ? 6 : D <= 128 ? 3 : 4;

  struct Storage {
    unsigned char q[Q_BYTES], slots[SLOTS][KV_BYTES];
    u64 full[8], empty[8];
  };
  static constexpr int Q = OFFSET_OF(Storage, q), RING = OFFSET_OF(Storage, slots);
  static constexpr int FULL = OFFSET_OF(Storage, full), EMPTY = OFFSET_OF(Storage, empty), SHARED_BYTES = sizeof(Storage);
  static_assert(SLOTS <= 8, "barriers");
  static_assert(SHARED_BYTES <= (CTAS == 2 ? 115712 : MOST_SHARED_BYTES), "shared memory of one SM");
};

// A place in a ring of slots. FULL: written, may be read. EMPTY: read, may be overwritten.
template <typename C> struct Ring {
  u32 shared, slot = 0, phase = 0;

  DEVICE Barrier full() const { return {shared + C::FULL + 8 * slot}; }
  DEVICE Barrier empty() const { return {shared + C::EMPTY + 8 * slot}; }
  DEVICE u32 address() const { return shared + C::RING + slot * C::KV_BYTES; }
  DEVICE void next() {
    slot++;
    if (slot == C::SLOTS) {
      slot = 0;
      phase ^= 1;
    }
  }
  static DEVICE void init(u32 shared) {
    for (int i = 0; i < C::SLOTS; i++) {
      mbarrier_init(shared + C::FULL + 8 * i, 1);
      mbarrier_init(shared + C::EMPTY + 8 * i, C::CONSUMER_WARPS);
    }
    mbarrier_init_fence();
    fence_async_all();
  }
};
