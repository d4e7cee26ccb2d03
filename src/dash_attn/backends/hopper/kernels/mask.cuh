// Which elements of a partial tile attend.
#pragma once
#include "types.cuh"

enum class MaskKind { Band, Rows, Blocks, Packed };  // Packed: a band in each of many sequences that lie end to end
DEVICE constexpr bool is_band(MaskKind kind) { return kind == MaskKind::Band || kind == MaskKind::Packed; }

struct MaskParams {
  int q_len, kv_len;  // of every sequence, in a batch of equal lengths
  int band_right;     // Band: key - query <= band_top, which is band_right and the offset that aligns the last query with the last key ...
  u32 band_width;     // ... and band_top - (key - query) <= band_width
  const int2* rows;   // Rows: first kept key and end of the kept keys of each query
  const unsigned char* blocks;  // Blocks: one byte per block of block_q x block_kv
  int block_q, block_kv, block_columns;

  DEVICE int band_top(int queries, int keys) const { return keys - queries + band_right; }
};

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
