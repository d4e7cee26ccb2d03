// Bits of the partial tiles of a boolean matrix, in the order in which the threads of consumers hold scores (OwnBits of common/mask.cuh).
#pragma once
#include "common/shared_with_python.cuh"

// Register 4 g + e of a score tile is row 8 (e / 2) + lane / 4 of the sixteen of a warp, column 8 g + 2 (lane % 4) + e % 2.
// Rows are queries in the forward, keys in the backward; a warpgroup has 64 of them.
template <int Q_ROWS, int KV_ROWS, bool FORWARD> struct BitLayout {
  static constexpr int ROWS = FORWARD ? Q_ROWS : KV_ROWS, SCORES = (FORWARD ? KV_ROWS : Q_ROWS) / 2;
  static constexpr int THREADS = 2 * ROWS, WORDS = SCORES > 32 ? 2 : 1;
  static DEVICE int row(int thread, int i) { return thread / WARP * 16 + 8 * (i >> 1 & 1) + thread % WARP / 4; }
  static DEVICE int column(int thread, int i) { return 8 * (i / 4) + 2 * (thread % 4) + (i & 1); }
};

// BitMatrix of masks/bit_matrix.py: a word is a row of a block of 64 x 64, bit j its column j. A block may overhang the lengths.
DEVICE bool attends(const MaskBitsParams& p, int query, int key) {
  if (query >= p.q_len || key >= p.kv_len) return false;
  const i64 block = p.places[(i64)(query / 64) * p.block_columns + key / 64];
  return p.words[64 * block + query % 64] >> (key % 64) & 1;
}

// One thread for each that will read the bits of a tile.
template <int Q_ROWS, int KV_ROWS, bool FORWARD> __global__ void __launch_bounds__(256)
    pack_mask_bits(const __grid_constant__ MaskBitsParams p) {
  using L = BitLayout<Q_ROWS, KV_ROWS, FORWARD>;
  const i64 place = (i64)blockIdx.x * 256 + threadIdx.x;
  const int number = (int)(place / L::THREADS), thread = (int)(place % L::THREADS);
  if (number >= p.count) return;
  const int2 tile = p.tiles[number];
  u32 words[2] = {~0u, ~0u};  // there may be more bits than scores
#pragma unroll 4
  for (int i = 0; i < L::SCORES; i++) {
    const int row = L::row(thread, i), column = L::column(thread, i);
    const int query = tile.x * Q_ROWS + (FORWARD ? row : column), key = tile.y * KV_ROWS + (FORWARD ? column : row);
    if (!attends(p, query, key)) words[i / 32] &= ~(1u << (i % 32));
  }
  for (int w = 0; w < L::WORDS; w++) p.bits[place * L::WORDS + w] = words[w];
}
