// Tile sizes, shared-memory layout, barriers and parameters of the forward kernel.
#pragma once
#include "common/ptx.cuh"
#include "common/sequence.cuh"

template <int D_, int CONSUMERS_> struct ForwardConfig {
  static constexpr int D = D_, CONSUMERS = CONSUMERS_;  // consumers: warpgroups of 64 queries
  static constexpr int KV_ROWS = D <= 128 ? 128 : D == 192 ? 112 : 80, Q_ROWS = 64 * CONSUMERS, THREADS = WARPGROUP * (CONSUMERS + 1);
  static constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : D > 128 ? 232 : 224;
  static constexpr int LOADER_REGISTERS = CONSUMERS == 3 ? 32 : D > 128 ? 40 : 56;
  static constexpr int PANELS = (D + 63) / 64, PANEL = 64 * 128;  // 64 rows of 64 columns, 128-byte swizzle; the last may be zeros in part
  static constexpr int STAGES = 2, Q_STAGES = D <= 128 ? 2 : 1;
  static constexpr int SCORES = KV_ROWS / 2, OUTPUTS = D / 2;  // registers of S and O
  static constexpr int HALF_BYTES = PANELS * PANEL;            // the queries of one warpgroup
  static constexpr int Q_BYTES = CONSUMERS * HALF_BYTES, KV_BYTES = KV_ROWS * PANELS * 128, KV_PANEL = KV_ROWS * 128;
  static constexpr int Q = 0, K = Q + Q_STAGES * Q_BYTES, V = K + STAGES * KV_BYTES, BEHIND_V = V + STAGES * KV_BYTES;
  static constexpr bool OUT_OVER_Q = Q_STAGES == 1;  // wide heads: the output leaves through the memory of its queries
  static constexpr int OUT = OUT_OVER_Q ? Q : BEHIND_V, TILE_NOTES = OUT_OVER_Q ? BEHIND_V : OUT + Q_BYTES;
  static constexpr int VISIT_NOTES = TILE_NOTES + 2 * 32, BARRIERS = VISIT_NOTES + 16, SHARED_BYTES = BARRIERS + 128;
  static_assert(SHARED_BYTES <= 232448, "shared memory of one SM");
};

namespace forward_barrier {
enum : int { TILE_FULL = 0, TILE_EMPTY = 16, Q_FULL = 32, Q_EMPTY = 48, K_FULL = 64, K_EMPTY = 80, V_FULL = 96, V_EMPTY = 112 };  // [2] each
}

// What the loader tells the consumers about a tile. Row r of its sequence is at TMA coordinates (r + q_shift, q_plane).
struct TileNote {
  int visits, q_head, query, q_shift;  // visits: KV tiles, -1 if no more tiles come; query: first row of the tile
  int q_plane, q_len, kv_len, lse_at;  // lse_at: index of the sequence's first row
};

// ... and about a visit, in one word.
struct VisitNote {
  int word;
  static DEVICE VisitNote pack(int kv_tile, bool partial) { return {2 * kv_tile + partial}; }
  DEVICE int kv_tile() const { return word >> 1; }
  DEVICE bool partial() const { return word & 1; }
};

// Walks the KV tiles of a Q tile downward, by the tables.
struct TableVisits {
  const int2* run;
  int kv_tile, left;
  bool partial;

  DEVICE TableVisits(const VisitTables& tables, int q_tile) : run(tables.runs + tables.first_runs[q_tile]), left(0) {}
  DEVICE void next() {
    if (left == 0) {
      const int2 r = *run++;
      kv_tile = r.x + 1;
      left = r.y >> 1;
      partial = r.y & 1;
    }
    kv_tile--;
    left--;
  }
};

// The same for a tile of a packed sequence.
struct PackedVisits {
  int kv_tile, full_first, full_end;
  bool partial;

  DEVICE PackedVisits(const PackedTile& tile) : kv_tile(tile.kv_first + 1), full_first(tile.full_first), full_end(tile.full_end) {}
  DEVICE void next() {
    kv_tile--;
    partial = kv_tile < full_first || kv_tile >= full_end;
  }
};
