// Tile sizes, shared-memory layout, barriers and parameters of the forward kernel.
#pragma once
#include "mask.cuh"
#include "ptx.cuh"

// Which KV tiles each Q tile visits, and in which order Q tiles are taken.
struct VisitTables {
  const int* q_order;     // Q tiles that visit anything, longest first
  const int* first_runs;  // [q_tiles + 1]
  const int2* runs;       // first KV tile, 2 * length + partial; KV tiles go downward
  const int* visits;      // [q_tiles] KV tiles each Q tile visits
};

struct ForwardParams {
  float* lse;  // [batch][q_heads][q_len], natural log
  int* next_ticket;
  int batch, q_heads, group, places, tickets;  // places: entries of q_order
  int heads_side_by_side;  // heads whose K and V fit the L2 cache together
  float scale_log2;
  MaskParams mask;
  VisitTables visits;
};

template <int D_, int CONSUMERS_> struct ForwardConfig {
  static constexpr int D = D_, CONSUMERS = CONSUMERS_;  // consumers: warpgroups of 64 queries
  static constexpr int KV_ROWS = 128, Q_ROWS = 64 * CONSUMERS, THREADS = WARPGROUP * (CONSUMERS + 1);
  static constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : 224, LOADER_REGISTERS = CONSUMERS == 3 ? 32 : 56;
  static constexpr int PANELS = D / 64, PANEL = 64 * 128;  // 64 rows of 64 columns, 128-byte swizzle
  static constexpr int STAGES = 2;
  static constexpr int SCORES = KV_ROWS / 2, OUTPUTS = D / 2;  // registers of S and O
  static constexpr int HALF_BYTES = 64 * D * 2;                // the queries of one warpgroup
  static constexpr int Q_BYTES = CONSUMERS * HALF_BYTES, KV_BYTES = KV_ROWS * D * 2, KV_PANEL = KV_ROWS * 128;
  static constexpr int Q = 0, K = Q + STAGES * Q_BYTES, V = K + STAGES * KV_BYTES, OUT = V + STAGES * KV_BYTES;
  static constexpr int TILE_NOTES = OUT + Q_BYTES, VISIT_NOTES = TILE_NOTES + 32, BARRIERS = VISIT_NOTES + 16, SHARED_BYTES = BARRIERS + 128;
  static_assert(SHARED_BYTES <= 232448, "shared memory of one SM");
};

namespace forward_barrier {
enum : int { TILE_FULL = 0, TILE_EMPTY = 16, Q_FULL = 32, Q_EMPTY = 48, K_FULL = 64, K_EMPTY = 80, V_FULL = 96, V_EMPTY = 112 };  // [2] each
}

// What the loader tells the consumers about a tile: (sequence, query head), Q tile, KV tiles to visit (-1: no more tiles).
struct TileNote {
  int head_of_batch, q_tile, visits;
};

// ... and about a visit, in one word.
struct VisitNote {
  int word;
  static DEVICE VisitNote pack(int kv_tile, bool partial) { return {2 * kv_tile + partial}; }
  DEVICE int kv_tile() const { return word >> 1; }
  DEVICE bool partial() const { return word & 1; }
};

// Walks the KV tiles of a Q tile downward.
struct Visits {
  const int2* run;
  int kv_tile, left;
  bool partial;

  DEVICE Visits(const VisitTables& tables, int q_tile) : run(tables.runs + tables.first_runs[q_tile]), left(0) {}
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
