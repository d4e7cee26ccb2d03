// From a dQ tile to the rows of the caller's tensors.
#pragma once
#include "common/sequence.cuh"

struct TilePlace {
  i64 batch, head, first_row;  // in the caller's tensor; packed sequences are one batch
  int rows;                    // of the tile that exist; none if not positive
  i64 first_lse;

  DEVICE i64 offset(const i64 (&strides)[3], int row) const { return batch * strides[0] + (first_row + row) * strides[1] + head * strides[2]; }
};

// In a batch tiles are numbered [sequence][query head][Q tile]; packed, [query head][Q tile of all sequences].
struct TilePlaces {
  int batch, q_heads, group, q_len, tokens;  // tokens: packed queries
  int head_tiles;                            // tiles between a query head and the next
  const Sequence* sequences;                 // packed only
  const int2* tile_places;                   // packed only: [head_tiles] sequence, Q tile inside it; -1: no such tile

  DEVICE int tiles() const { return batch * q_heads * head_tiles; }

  template <int Q_ROWS, bool PACKED> DEVICE TilePlace locate(int tile) const {
    const int head_of_batch = tile / head_tiles, q_tile = tile - head_of_batch * head_tiles;
    const int sequence = head_of_batch / q_heads, head = head_of_batch - sequence * q_heads;
    if constexpr (!PACKED) {
      const int first = q_tile * Q_ROWS;
      return {sequence, head, first, q_len - first, (i64)head_of_batch * q_len + first};
    }
    const int2 at = tile_places[q_tile];
    if (at.x < 0) return {};
    const Sequence& s = sequences[at.x];
    const int first = at.y * Q_ROWS;
    const i64 token = (i64)s.q_plane - s.q_len + first;  // plane is start + length
    return {0, head, token, s.q_len - first, (i64)head * tokens + token};
  }
};
