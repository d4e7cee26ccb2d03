// Where the rows of a sequence lie, and what its mask needs to know of its lengths.
//
// Row r of a sequence is read and written at TMA coordinates (r + shift, plane). In a batch of equal lengths shift is 0 and
// plane is the sequence. Packed sequences lie end to end, and nothing may be read or written beyond an end. Their tensor map
// has two axes over the same rows, row = shift axis + plane axis - RAGGED, and the shift axis ends at RAGGED: with
// shift = RAGGED - length and plane = start + length, coordinate r + shift leaves the axis just where the sequence ends, so
// the TMA unit fills in zeros behind it and drops stores there, as it does at the end of a batch. (The subtraction is a fifth
// axis whose stride takes the address once around 2^64; a base address before the tensor faults.)
#pragma once
#include "common/mask.cuh"

DEVICE Sequence sequence_of_batch(const MaskParams& mask, int sequence, int first_tile) {
  return {mask.q_len, mask.kv_len, 0, sequence, 0, sequence, first_tile, band_top(mask, mask.q_len, mask.kv_len)};
}

// From a dQ tile to the rows of the caller's tensors.
struct TilePlace {
  i64 batch, head, first_row;  // in the caller's tensor; packed sequences are one batch
  int rows;                    // of the tile that exist; none if not positive
  i64 first_lse;

  DEVICE i64 offset(const i64 (&strides)[3], int row) const {
    return batch * strides[0] + (first_row + row) * strides[1] + head * strides[2];
  }
};

DEVICE int tile_count(const TilePlaces& places) { return places.batch * places.q_heads * places.head_tiles; }

template <int Q_ROWS, bool PACKED> DEVICE TilePlace locate(const TilePlaces& places, int tile) {
  const int head_of_batch = tile / places.head_tiles, q_tile = tile - head_of_batch * places.head_tiles;
  const int sequence = head_of_batch / places.q_heads, head = head_of_batch - sequence * places.q_heads;
  if constexpr (!PACKED) {
    const int first = q_tile * Q_ROWS;
    return {sequence, head, first, places.q_len - first, (i64)head_of_batch * places.q_len + first};
  }
  const int2 at = places.tile_places[q_tile];
  if (at.x < 0) return {};
  const Sequence& s = places.sequences[at.x];
  const int first = at.y * Q_ROWS;
  const i64 token = (i64)s.q_plane - s.q_len + first;  // plane is start + length
  return {0, head, token, s.q_len - first, (i64)head * places.tokens + token};
}
