// From a row of a dQ tile to the row of the caller's tensors.
#pragma once
#include "sequence.cuh"

struct RowPlace {
  bool exists;
  i64 batch, row, head;  // in the caller's tensor; packed sequences are one batch
  i64 lse_at;

  DEVICE i64 offset(const i64 (&strides)[3]) const { return batch * strides[0] + row * strides[1] + head * strides[2]; }
};

// In a batch tiles are numbered [sequence][query head][Q tile]; packed, [query head][Q tile of all sequences].
struct RowPlaces {
  int batch, q_heads, group, q_len, tokens;  // tokens: packed queries
  int head_tiles;                            // tiles between a query head and the next
  const Sequence* sequences;                 // packed only
  const int2* tile_places;                   // packed only: [head_tiles] sequence, Q tile inside it; -1: no such tile

  DEVICE int tiles() const { return batch * q_heads * head_tiles; }

  template <int Q_ROWS, bool PACKED> DEVICE RowPlace locate(int tile, int within) const {
    const int head_of_batch = tile / head_tiles, q_tile = tile - head_of_batch * head_tiles;
    const int sequence = head_of_batch / q_heads, head = head_of_batch - sequence * q_heads;
    if constexpr (!PACKED) {
      const int row = q_tile * Q_ROWS + within;
      return {row < q_len, sequence, row, head, (i64)head_of_batch * q_len + row};
    }
    const int2 at = tile_places[q_tile];
    if (at.x < 0) return {false};
    const Sequence& s = sequences[at.x];
    const int row = at.y * Q_ROWS + within;
    const i64 token = (i64)s.q_plane - s.q_len + row;  // plane is start + length
    return {row < s.q_len, 0, token, head, (i64)head * tokens + token};
  }
};
