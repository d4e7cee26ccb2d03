// Which elements of a partial tile attend.
#pragma once
#include "types.cuh"

enum class MaskKind { Band, Rows, Blocks };

struct MaskParams {
  int q_len, kv_len;
  int band_top;      // Band: key - query <= band_top ...
  u32 band_width;    // ... and band_top - (key - query) <= band_width
  const int2* rows;  // Rows: first kept key and end of the kept keys of each query
  const unsigned char* blocks;  // Blocks: one byte per block of block_q x block_kv
  int block_q, block_kv, block_columns;
};

// The keys one thread looks at are fixed, so what depends on the key alone is prepared once.
template <MaskKind KIND> struct KeyMask {
  int key;    // Rows, Blocks: the key, or an impossible one beyond the sequence
  int above;  // Band: band_top - key, or so far off that every query is out of the band

  DEVICE KeyMask(const MaskParams& mask, int k) {
    const bool beyond = k >= mask.kv_len;
    key = beyond ? 0x7fffffff : k;
    above = beyond ? -0x40000000 : mask.band_top - k;
  }
  DEVICE bool keeps(const MaskParams& mask, int query) const {
    if constexpr (KIND == MaskKind::Band) return (u32)(above + query) <= mask.band_width;
    if (key == 0x7fffffff || query >= mask.q_len) return false;
    if constexpr (KIND == MaskKind::Rows) {
      const int2 kept = mask.rows[query];
      return key >= kept.x && key < kept.y;
    }
    return mask.blocks[(i64)(query / mask.block_q) * mask.block_columns + key / mask.block_kv] != 0;
  }
};
