// Which elements of a partial tile attend.
#pragma once
#include "common/shared_with_python.cuh"

// MaskKind::Packed is a band in each of many sequences that lie end to end.
DEVICE constexpr bool is_band(MaskKind kind) { return kind == MaskKind::Band || kind == MaskKind::Packed; }

DEVICE int band_top(const MaskParams& mask, int queries, int keys) { return keys - queries + mask.band_right; }

// The keys one thread looks at are fixed, so what depends on the key alone is prepared once.
template <MaskKind KIND> struct KeyMask {
  static constexpr int BEYOND = is_band(KIND) ? -0x40000000 : 0x7fffffff;
  int key;  // Band: band_top - key; else the key itself. BEYOND the sequence: so far off that no query attends it.

  // Key `local` of a KV tile with `keys` keys. `from`: band_top (Band) or the key itself, for the first key of the tile.
  DEVICE KeyMask(int local, int keys, int from) : key(local >= keys ? BEYOND : is_band(KIND) ? from - local : from + local) {}
  DEVICE bool keeps(const MaskParams& mask, int query) const {
    if constexpr (is_band(KIND)) return (u32)(key + query) <= mask.band_width;
    if (key == BEYOND || query >= mask.q_len) return false;
    if constexpr (KIND == MaskKind::Rows) {
      const int2 kept = mask.rows[query];
      return key >= kept.x && key < kept.y;
    }
    return mask.blocks[(i64)(query / mask.block_q) * mask.block_columns + key / mask.block_kv] != 0;
  }
};

// MaskKind::Bits is any boolean matrix. A partial tile has bits of its own, in the order in which the threads of a warpgroup hold its
// scores (planning/mask_bits.cuh), and a number: that of its bits.
struct BitTables {
  const MaskParams& mask;
  // Of the tile, from [row of tiles][tile]; where heads have matrices of their own, as many further on as the tiles of the matrices before
  // have, from [sequence][query head] behind it.
  DEVICE int number(int row, int tile, int sequence, int q_head) const {
    const int in_matrix = __ldg(mask.tile_numbers + row * mask.row_tiles + tile), per_head = mask.head_numbers;
    return per_head == 0 ? in_matrix : in_matrix + __ldg(mask.tile_numbers + per_head + sequence * mask.numbered_heads + q_head);
  }
  // What a note says of a tile, in one word: 0 if all elements attend.
  static DEVICE int note(int number) { return 2 * number + 1; }
};

// The bits of this thread's scores. Loaded long before the scores come. `thread`: of all consumers that share a tile, `THREADS` of them.
template <MaskKind KIND, int SCORES, int THREADS> struct OwnBits {
  DEVICE OwnBits() {}
  DEVICE OwnBits(const MaskParams&, int, u32) {}
};
template <int SCORES, int THREADS> struct OwnBits<MaskKind::Bits, SCORES, THREADS> {
  static constexpr int WORDS = SCORES > 32 ? 2 : 1;
  u32 low = ~0u, high = ~0u;

  DEVICE OwnBits() {}
  DEVICE OwnBits(const MaskParams& mask, int note, u32 thread) {
    if (!(note & 1)) return;
    const i64 at = (i64)(note >> 1) * THREADS + thread;
    if constexpr (WORDS == 2) {
      const uint2 both = __ldg((const uint2*)mask.tile_bits + at);
      low = both.x, high = both.y;
    } else {
      low = __ldg(mask.tile_bits + at);
    }
  }
  DEVICE bool keep_all() const { return WORDS == 2 ? (low & high) == ~0u : low == ~0u; }
  DEVICE void apply(float (&s)[SCORES], float masked) const {
    if (keep_all()) return;
#pragma unroll
    for (int i = 0; i < SCORES; i++)
      if (!((i < 32 ? low : high) >> (i % 32) & 1)) s[i] = masked;
  }
};

// Sets the scores that do not attend. Register 4 g + e of a score tile is key row + 8 (e / 2), query column 8 g + e % 2 of `query`.
template <MaskKind KIND, int SCORES> DEVICE void mask_scores(float (&s)[SCORES], const MaskParams& mask, const KeyMask<KIND>& low,
                                                             const KeyMask<KIND>& high, int query, float masked) {
  if constexpr (is_band(KIND)) {
#pragma unroll
    for (int i = 0; i < SCORES; i++) {
      const KeyMask<KIND>& row = (i & 2) ? high : low;
      if (!row.keeps(mask, query + 8 * (i / 4) + (i & 1))) s[i] = masked;
    }
  } else {  // look-ups in a loop, one at a time: there are no registers to have many in flight
    u32 low_keeps = 0, high_keeps = 0;
#pragma unroll 1
    for (int column = 0; column < SCORES / 2; column++) {
      const int at = query + 8 * (column / 2) + (column & 1);
      low_keeps |= (u32)low.keeps(mask, at) << column;
      high_keeps |= (u32)high.keeps(mask, at) << column;
    }
#pragma unroll
    for (int i = 0; i < SCORES; i++)
      if (!(((i & 2) ? high_keeps : low_keeps) >> (2 * (i / 4) + (i & 1)) & 1)) s[i] = masked;
  }
}
