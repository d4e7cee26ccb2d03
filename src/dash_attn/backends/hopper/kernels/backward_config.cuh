// Tile sizes, shared-memory layout, barriers and parameters of the backward kernel.
#pragma once
#include "mask.cuh"
#include "plan.cuh"
#include "ptx.cuh"

constexpr int KV_ROWS = 128;  // rows of a KV tile: two consumer warpgroups of 64
constexpr int STAGES = 2;     // Q and dO tiles in flight, dS buffers, dQ staging buffers
constexpr int NOTES = 8;      // step notes from the planner in flight

struct BackwardParams {
  const float* lse;    // [q_head][q_tiles * Q_ROWS], times log2(e); FAR where a row attends nothing or does not exist
  const float* delta;  // same layout: rowsum(dO * O)
  float* dq;           // [q_head][q_tiles][Q_ROWS * D], in accumulator-fragment order
  int* semaphores;     // [q_head][q_tiles]: reduces that have landed
  int* next_ticket;
  const Ticket* tickets;
  int* hang_report;    // host memory: flag, dQ tile, rank
  u32 most_polls;      // of a semaphore before the wait is called a hang
  int kv_heads, group, q_tiles;
  float scale_log2, scale, masked_score;
  MaskParams mask;
  PlanTables plan;
  struct StepRecord* record;   // [dq tile][kv_tiles], by rank; only a kernel that records has it
  struct ClockRecord* clocks;  // [2][CTAs]: at a CTA's start, at its end
};

// What the drains of a recording kernel write, in cycles of the SM: dQ ready, turn come, landed; which CTA.
struct alignas(16) StepRecord {
  u32 ready, turn, landed, cta;
};
// The clock all SMs share (ns) beside the SM's own.
struct alignas(16) ClockRecord {
  u64 shared_ns;
  u32 cycles, sm;
};

template <int D_, int Q_ROWS_> struct BackwardConfig {
  static constexpr int D = D_, Q_ROWS = Q_ROWS_;
  static constexpr int PANELS = D / 64;  // 128-byte swizzled panels of 64 columns
  // With D = 64 a warpgroup computes dQ^T for half of the Q rows; with D = 128, dQ for half of the columns.
  static constexpr bool DQ_TRANSPOSED = D == 64;
  static constexpr int SCORE_REGISTERS = Q_ROWS / 2;              // S^T and dP^T: 64 x Q_ROWS per warpgroup
  static constexpr int DQ_REGISTERS = Q_ROWS * D / 256;
  static constexpr int KV_BYTES = KV_ROWS * D * 2, Q_BYTES = Q_ROWS * D * 2, DS_BYTES = Q_ROWS * KV_ROWS * 2;
  static constexpr int DQ_BYTES = Q_ROWS * D * 4, ROW_BYTES = Q_ROWS * 4;
  static constexpr int KV_PANEL = KV_ROWS * 128, Q_PANEL = Q_ROWS * 128;

  static constexpr int K = 0, V = K + KV_BYTES, Q = V + KV_BYTES, DO = Q + STAGES * Q_BYTES, DS = DO + STAGES * Q_BYTES;
  static constexpr int DQ = DS + STAGES * DS_BYTES, LSE = DQ + STAGES * DQ_BYTES, DELTA = LSE + STAGES * ROW_BYTES;
  static constexpr int STEP_NOTES = DELTA + STAGES * ROW_BYTES, CHAIN_NOTES = STEP_NOTES + NOTES * 16;
  static constexpr int BARRIERS = CHAIN_NOTES + STAGES * 16;
  static constexpr int SHARED_BYTES = BARRIERS + 320;
  static constexpr int OUT = DS;  // dV, then dK, leave through the dS buffers, so that the next K and V can load meanwhile
  static_assert(STAGES * DS_BYTES >= KV_BYTES, "dK and dV leave through the dS buffers");
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
  DO_FULL = 96,         // [2] dO and delta
  DO_EMPTY = 112,       // [2]
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

// What the planner tells the other roles about a chain: where its dK and dV go, how many steps it has (-1: no more chains).
struct ChainNote {
  int sequence, kv_head, kv_tile, steps;
};
// ... and about a step: first query, whether elements must be masked, which query head of the group, dQ tile, rank.
struct StepNote {
  int rows;  // what a consumer wants, in one word
  int member, dq_tile, rank;
  static DEVICE int pack_rows(int q_row, int partial) { return 2 * q_row + partial; }
  DEVICE int q_row() const { return rows >> 1; }
  DEVICE bool partial() const { return rows & 1; }
};

// The notes in shared memory, seen by every role.
template <typename Config> struct Notes {
  u32 shared, bar;

  DEVICE u32 chain_at(u32 slot) const { return shared + Config::CHAIN_NOTES + 16 * slot; }
  DEVICE u32 step_at(u32 step) const { return shared + Config::STEP_NOTES + 16 * (step % NOTES); }
  DEVICE ChainNote await_chain(const Pipeline& pipe) const {
    mbarrier_wait(bar + CHAIN_FULL + 8 * pipe.chain_slot(), pipe.chain_phase());
    const int4 v = load_shared_i32x4(chain_at(pipe.chain_slot()));
    return {v.x, v.y, v.z, v.w};
  }
  DEVICE StepNote step(u32 step) const {
    const int4 v = load_shared_i32x4(step_at(step));
    return {v.x, v.y, v.z, v.w};
  }
};
