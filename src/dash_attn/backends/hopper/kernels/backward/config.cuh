// Tile sizes, shared-memory layout, barriers and parameters of the backward kernel.
#pragma once
#include "common/mask.cuh"
#include "device_planning/walk.cuh"
#include "common/ptx.cuh"

constexpr int STAGES = 2;  // Q tiles in flight (dO, dS and dQ buffers too, where there is room)
constexpr int NOTES = 8;   // step notes from the planner in flight

// Up to head dim 128: a warpgroup owns 64 of 128 KV rows. P and dS stay in registers as A operands of dV and dK.
template <int D_> struct TallConfig {
  static constexpr int D = D_, Q_ROWS = D == 64 ? 128 : 64, KV_ROWS = 128, DO_STAGES = 2;
  static constexpr int HELPER_REGISTERS = 24, CONSUMER_REGISTERS = 240;  // of 128 and 256 threads; the CTA is launched with 384 x 168
  static constexpr int PANELS = (D + 63) / 64, WIDTH = 64 * PANELS;  // 128-byte swizzled panels of 64 columns; the last may be zeros in part
  // With D = 64 a warpgroup computes dQ^T for half of the Q rows, else dQ for 64 of the columns.
  static constexpr bool DQ_TRANSPOSED = D == 64;
  static constexpr int SCORE_REGISTERS = Q_ROWS / 2;  // S^T and dP^T: 64 x Q_ROWS per warpgroup
  static constexpr int DQ_REGISTERS = Q_ROWS * WIDTH / 256;
  static constexpr int KV_BYTES = KV_ROWS * WIDTH * 2, Q_BYTES = Q_ROWS * WIDTH * 2, DS_BYTES = Q_ROWS * KV_ROWS * 2;
  static constexpr int DQ_BYTES = Q_ROWS * WIDTH * 4, ROW_BYTES = Q_ROWS * 4;
  static constexpr int DQ_PIECES = 1;  // a dQ tile leaves through its staging buffer at once
  static constexpr int KV_PANEL = KV_ROWS * 128, Q_PANEL = Q_ROWS * 128;

  static constexpr int K = 0, V = K + KV_BYTES, Q = V + KV_BYTES, DO = Q + STAGES * Q_BYTES, DS = DO + STAGES * Q_BYTES;
  static constexpr int DQ = DS + STAGES * DS_BYTES, LSE = DQ + STAGES * DQ_BYTES;
  static constexpr int OUT = DS;  // dV, then dK, leave through the dS buffers, so that the next K and V can load meanwhile
  static_assert(STAGES * DS_BYTES >= KV_BYTES, "dK and dV leave through the dS buffers");
  DEVICE static constexpr int dq_staging(int stage) { return DQ + stage * DQ_BYTES; }
  DEVICE static constexpr int piece_bytes(int) { return DQ_BYTES; }
};

// Beyond: accumulators of 64 KV rows fill the registers, so a warpgroup owns half of the columns of dK, dV and dQ and half of
// the scores; P and dS go through shared memory. Its columns are a panel of its own and the inner panel next to it, or, with
// D = 192, half of the one inner panel. dQ leaves in two pieces: own panels first, inner panels second.
template <int D_> struct WideConfig {
  static constexpr int D = D_, Q_ROWS = 64, KV_ROWS = 64, DO_STAGES = 1;
  static constexpr int HELPER_REGISTERS = D == 192 ? 40 : 24, CONSUMER_REGISTERS = D == 192 ? 232 : 240;
  static constexpr int PANELS = D / 64, WIDTH = D, INNER = D / 2 - 64;  // INNER: columns of a warpgroup in inner panels
  static constexpr int KV_BYTES = KV_ROWS * D * 2, Q_BYTES = Q_ROWS * D * 2, TILE = Q_ROWS * KV_ROWS * 2;
  static constexpr int OWN_BYTES = 2 * Q_ROWS * 64 * 4, INNER_BYTES = 2 * Q_ROWS * INNER * 4, ROW_BYTES = Q_ROWS * 4;
  static constexpr int DQ_PIECES = 2;
  static constexpr int KV_PANEL = KV_ROWS * 128, Q_PANEL = Q_ROWS * 128;

  static constexpr int K = 0, V = K + KV_BYTES, Q = V + KV_BYTES, DO = Q + STAGES * Q_BYTES, P = DO + Q_BYTES, DS = P + STAGES * TILE;
  static constexpr int DQ = DS + STAGES * TILE, LSE = DQ + OWN_BYTES;
  static constexpr int OUT = P;  // dV, then dK, leave through the P and dS buffers
  static_assert(2 * STAGES * TILE >= KV_BYTES, "dK and dV leave through the P and dS buffers");
  static_assert(D == 192 || D == 256, "whole inner panels, or two halves of one");
  DEVICE static constexpr int dq_staging(int) { return DQ; }
  DEVICE static constexpr int piece_bytes(int piece) { return piece ? INNER_BYTES : OWN_BYTES; }
  DEVICE static int own_panel(int wg) { return wg * (PANELS - 1); }
  DEVICE static int inner_column(int wg) { return 64 + wg * INNER; }  // of the whole tile
};

template <bool WIDE, int D> struct ConfigChoice {
  using type = TallConfig<D>;
};
template <int D> struct ConfigChoice<true, D> {
  using type = WideConfig<D>;
};

// Behind the tiles: row statistics, notes, barriers.
template <int D> struct BackwardConfig : ConfigChoice<(D > 128), D>::type {
  using Tiles = typename ConfigChoice<(D > 128), D>::type;
  static constexpr int DELTA = Tiles::LSE + STAGES * Tiles::ROW_BYTES;
  static constexpr int STEP_NOTES = DELTA + Tiles::DO_STAGES * Tiles::ROW_BYTES, CHAIN_NOTES = STEP_NOTES + NOTES * 16;
  static constexpr int BARRIERS = CHAIN_NOTES + STAGES * 48;
  static constexpr int SHARED_BYTES = BARRIERS + 320;  // BARRIER_BYTES below
  static_assert(SHARED_BYTES <= 232448, "shared memory of one SM");
};

// Barriers, as byte offsets. FULL: written, may be read. EMPTY: read, may be overwritten.
enum Barrier : int {
  CHAIN_FULL = 0,       // [2] the note of a chain
  CHAIN_EMPTY = 16,     // [2] all roles have finished a chain
  CHAIN_LOADED = 32,    // every tile of a chain has been asked for
  K_FULL = 40,
  V_FULL = 48,
  KV_EMPTY = 56,
  Q_FULL = 64,          // [2] Q, LSE and the step's note
  Q_EMPTY = 80,         // [2]
  DO_FULL = 96,         // [DO_STAGES] dO and delta
  DO_EMPTY = 112,       // [DO_STAGES]
  DS_FULL = 128,        // [2]
  DS_EMPTY = 144,       // [2]
  DQ_FULL = 160,        // [2]
  DQ_EMPTY = 176,       // [2]
  NOTE_FULL = 192,      // [NOTES] the note of a step
  NOTE_EMPTY = 256,     // [NOTES]
  BARRIER_BYTES = 320,
};

constexpr int CONSUMER_WARPS = 8, DRAINS = 2, LOADERS = 1;

DEVICE void init_barriers(u32 bar) {
  for (int s = 0; s < STAGES; s++) {
    mbarrier_init(bar + CHAIN_FULL + 8 * s, 1);
    mbarrier_init(bar + CHAIN_EMPTY + 8 * s, CONSUMER_WARPS + DRAINS + LOADERS);
    mbarrier_init(bar + Q_FULL + 8 * s, 1);
    mbarrier_init(bar + Q_EMPTY + 8 * s, CONSUMER_WARPS);
    mbarrier_init(bar + DO_FULL + 8 * s, 1);
    mbarrier_init(bar + DO_EMPTY + 8 * s, CONSUMER_WARPS);
    mbarrier_init(bar + DS_FULL + 8 * s, CONSUMER_WARPS);
    mbarrier_init(bar + DS_EMPTY + 8 * s, CONSUMER_WARPS);
    mbarrier_init(bar + DQ_FULL + 8 * s, CONSUMER_WARPS);
    mbarrier_init(bar + DQ_EMPTY + 8 * s, 1);
  }
  for (int n = 0; n < NOTES; n++) {
    mbarrier_init(bar + NOTE_FULL + 8 * n, 1);
    mbarrier_init(bar + NOTE_EMPTY + 8 * n, 1);
  }
  mbarrier_init(bar + CHAIN_LOADED, 1);
  mbarrier_init(bar + K_FULL, 1);
  mbarrier_init(bar + V_FULL, 1);
  mbarrier_init(bar + KV_EMPTY, CONSUMER_WARPS);
  mbarrier_init_fence();
  fence_async_all();
}

// Every role counts chains and steps the same way. A chain always starts at stage 0; the phase of a stage's barriers
// flips each time the stage is used, so an odd chain leaves the two stages with different phases.
struct Pipeline {
  u32 chain = 0;      // chains done
  u32 steps = 0;      // steps done, over all chains
  u32 flips[2] = {0, 0};

  DEVICE u32 chain_slot() const { return chain & 1; }
  DEVICE u32 chain_phase() const { return (chain >> 1) & 1; }
  template <int STAGE> DEVICE u32 phase(int step) const { return ((u32)(step >> 1) + flips[STAGE]) & 1; }
  DEVICE void finish_chain(int count) {
    chain++;
    steps += count;
    flips[0] += (count + 1) >> 1;
    flips[1] += count >> 1;
  }
};

// What the planner tells the other roles about a chain. Row r of its sequence is at TMA coordinates (r + shift, plane).
struct ChainNote {
  int kv_head, kv_row, kv_plane, steps;   // kv_row: first key, shift included; steps: -1 if no more chains come
  int q_shift, q_plane, keys, band_top;   // keys: how many of the sequence begin with the first; band_top: see common/mask.cuh, from the first key
};
// ... and about a step: first query, whether elements must be masked, query head, dQ tile, rank.
struct StepNote {
  int rows;  // what a consumer wants, in one word
  int q_head, dq_tile, rank;
  static DEVICE int pack_rows(int q_row, int partial) { return 2 * q_row + partial; }
  DEVICE int q_row() const { return rows >> 1; }
  DEVICE bool partial() const { return rows & 1; }
};

// The notes in shared memory, seen by every role. A chain's is its whole ticket; the last four words are the planner's own.
template <typename C> struct Notes {
  u32 shared;

  DEVICE u32 chain_at(u32 slot) const { return shared + C::CHAIN_NOTES + 48 * slot; }
  DEVICE u32 step_at(u32 step) const { return shared + C::STEP_NOTES + 16 * (step % NOTES); }
  DEVICE void await_chain(const Pipeline& pipe) const { mbarrier_wait(shared + C::BARRIERS + CHAIN_FULL + 8 * pipe.chain_slot(), pipe.chain_phase()); }
  // The halves of a chain's note are read where they are needed: registers are scarcer than shared-memory loads.
  DEVICE ChainNote chain(const Pipeline& pipe) const {
    const int4 v = load_shared_i32x4(chain_at(pipe.chain_slot()));
    return {v.x, v.y, v.z, v.w};
  }
  DEVICE int q_shift(const Pipeline& pipe) const { return load_shared_i32(chain_at(pipe.chain_slot()) + 16); }
  DEVICE int q_plane(const Pipeline& pipe) const { return load_shared_i32(chain_at(pipe.chain_slot()) + 20); }
  DEVICE int keys(const Pipeline& pipe) const { return load_shared_i32(chain_at(pipe.chain_slot()) + 24); }
  template <MaskKind MASK> DEVICE int mask_from(const Pipeline& pipe) const {  // band_top or kv_row
    return load_shared_i32(chain_at(pipe.chain_slot()) + (is_band(MASK) ? 28 : 4));
  }
  DEVICE StepNote step(u32 step) const {
    const int4 v = load_shared_i32x4(step_at(step));
    return {v.x, v.y, v.z, v.w};
  }
};
