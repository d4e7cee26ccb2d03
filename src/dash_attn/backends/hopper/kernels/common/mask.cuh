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
