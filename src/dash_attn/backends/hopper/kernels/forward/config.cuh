// Tile sizes, shared-memory layout, barriers and parameters of the forward kernel.
#pragma once
#include "common/cta.cuh"
#include "common/sequence.cuh"

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

template <int D_, int CONSUMERS_, int V_DIM_ = D_> struct ForwardConfig {
  static constexpr int D = D_, V_DIM = V_DIM_, CONSUMERS = CONSUMERS_;  // consumers: warpgroups of 64 queries
  static constexpr int KV_ROWS = forward_kv_rows(D), Q_ROWS = 64 * CONSUMERS, THREADS = WARPGROUP * (CONSUMERS + 1);
  static constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : D > 128 ? 232 : 224;
  static constexpr int LOADER_REGISTERS = CONSUMERS == 3 ? 32 : D > 128 ? 40 : 56;
  static constexpr int PANELS = (D + 63) / 64, V_PANELS = (V_DIM + 63) / 64,
                       PANEL = HALF_PANEL;  // 64 rows of 64 columns; the last may be zeros in part
  static constexpr int STAGES = 2, Q_STAGES = D <= 128 ? 2 : 1;
  static constexpr int SCORES = KV_ROWS / 2, OUTPUTS = V_DIM / 2;  // registers of S and O
  static constexpr int HALF_BYTES = PANELS * PANEL;            // the queries of one warpgroup
  static constexpr int Q_BYTES = CONSUMERS * HALF_BYTES, KV_PANEL = KV_ROWS * PANEL_ROW;
  static constexpr int K_BYTES = PANELS * KV_PANEL, V_BYTES = V_PANELS * KV_PANEL;
  static constexpr int OUT_HALF = V_PANELS * PANEL;  // the output of one warpgroup
  // Wide values: the output leaves through the memory of its queries, whose size it has.
  static constexpr bool OUT_OVER_Q = V_DIM > 128;
  static constexpr int OUT_BYTES = OUT_OVER_Q ? 0 : CONSUMERS * OUT_HALF;
  static_assert(V_DIM <= D && (!OUT_OVER_Q || Q_STAGES == 1), "an output fits into what is kept for it");

  // The shared memory of a CTA.
  struct Storage {
    unsigned char q[Q_STAGES][Q_BYTES], k[STAGES][K_BYTES], v_and_out[STAGES * V_BYTES + OUT_BYTES];
    TileNote tile_notes[2];
    VisitNote visit_notes[4];  // two are used; barriers are aligned behind them
    u64 barriers[16];
  };
  static constexpr int Q = OFFSET_OF(Storage, q), K = OFFSET_OF(Storage, k), V = OFFSET_OF(Storage, v_and_out);
  static constexpr int OUT = OUT_OVER_Q ? Q : V + STAGES * V_BYTES;
  static constexpr int TILE_NOTES = OFFSET_OF(Storage, tile_notes), VISIT_NOTES = OFFSET_OF(Storage, visit_notes);
  static constexpr int BARRIERS = OFFSET_OF(Storage, barriers), SHARED_BYTES = sizeof(Storage);
  static_assert(SHARED_BYTES <= MOST_SHARED_BYTES, "shared memory of one SM");
};

// What a kernel is made for.
template <typename Half_, typename C_, bool SOFTCAP_, MaskKind MASK_, bool DROPOUT_ = false, bool ALIBI_ = false> struct ForwardVariant {
  using Half = Half_;
  using C = C_;
  static constexpr MaskKind MASK = MASK_;
  static constexpr bool SOFTCAP = SOFTCAP_, DROPOUT = DROPOUT_, ALIBI = ALIBI_, PACKED = MASK == MaskKind::Packed;
};
struct ForwardMaps {
  const TensorMap *q, *k, *v, *out;
};

// The barriers, by the address of the first: two of each, one per stage. FULL: written, may be read. EMPTY: read, may be overwritten.
struct ForwardBarrierHandles {
  u32 first;

  DEVICE Barrier tile_full(u32 slot) const { return Barrier{first}[slot]; }
  DEVICE Barrier tile_empty(u32 slot) const { return Barrier{first}[2][slot]; }
  DEVICE Barrier q_full(u32 stage) const { return Barrier{first}[4][stage]; }
  DEVICE Barrier q_empty(u32 stage) const { return Barrier{first}[6][stage]; }
  DEVICE Barrier k_full(u32 stage) const { return Barrier{first}[8][stage]; }
  DEVICE Barrier k_empty(u32 stage) const { return Barrier{first}[10][stage]; }
  DEVICE Barrier v_full(u32 stage) const { return Barrier{first}[12][stage]; }
  DEVICE Barrier v_empty(u32 stage) const { return Barrier{first}[14][stage]; }

  template <typename C> DEVICE void init() const {
    const int consumer_warps = 4 * C::CONSUMERS;
    for (int s = 0; s < 2; s++) {
      tile_full(s).init(1);
      tile_empty(s).init(consumer_warps + C::CONSUMERS);  // and storers
      q_full(s).init(1);
      q_empty(s).init(C::OUT_OVER_Q ? C::CONSUMERS : consumer_warps);  // who reads that memory last
      k_full(s).init(1);
      k_empty(s).init(consumer_warps);
      v_full(s).init(1);
      v_empty(s).init(consumer_warps);
    }
    mbarrier_init_fence();
    fence_async_all();
  }
};

// What every role knows.
struct ForwardRole {
  const ForwardParams& p;
  const ForwardMaps& maps;
  u32 shared;
  ForwardBarrierHandles bars;
  const ModifierParams* m;  // of dropout and ALiBi
};

// Read anew where it is needed: registers are scarcer than shared-memory loads.
template <typename C> DEVICE TileNote note_of_tile(u32 shared, u32 slot) {
  const int4 a = load_shared_i32x4(shared + C::TILE_NOTES + (u32)sizeof(TileNote) * slot),
             b = load_shared_i32x4(shared + C::TILE_NOTES + (u32)sizeof(TileNote) * slot + 16);
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

// Barriers of warps (bar.sync has 16): a warpgroup's turn on the tensor cores; its output is in shared memory; there is room for the next. One per
// warpgroup each.
enum NamedBarrier : int { TURN = 1, OUTPUT = 4, ROOM = 7 };

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
