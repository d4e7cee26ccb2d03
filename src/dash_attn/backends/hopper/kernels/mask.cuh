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
  int key;    // Rows, Blocks: the key, or an impossible one beyond the sequence
  int above;  // Band: band_top - key, or so far off that every query is out of the band

  // Key `local` of a KV tile that starts at first_key; `keys` and `band_top` count from there, too.
  DEVICE KeyMask(int local, int first_key, int keys, int band_top) {
    const bool beyond = local >= keys;
    key = beyond ? 0x7fffffff : first_key + local;
    above = beyond ? -0x40000000 : band_top - local;
  }
  DEVICE bool keeps(const MaskParams& mask, int query) const {
    if constexpr (is_band(KIND)) return (u32)(above + query) <= mask.band_width;
    if (key == 0x7fffffff || query >= mask.q_len) return false;
    if constexpr (KIND == MaskKind::Rows) {
      const int2 kept = mask.rows[query];
      return key >= kept.x && key < kept.y;
    }
    return mask.blocks[(i64)(query / mask.block_q) * mask.block_columns + key / mask.block_kv] != 0;
  }
};
