// Tile sizes, shared-memory layout, barriers and parameters of the backward kernel.
#pragma once
#include "common/mask.cuh"
#include "planning/walk.cuh"
#include "common/cta.cuh"

constexpr int STAGES = 2;  // Q tiles in flight (also dO, dS and dQ buffers, where there is room)
constexpr int NOTES = 8;   // step notes from the planner in flight

// Head dims: D of q and k, DV of v. Values up to 128: a warpgroup owns 64 of 128 KV rows.
DEVICE constexpr bool is_tall(int dv) { return dv <= 128; }

// P and dS stay in registers as A operands of dV and dK.
template <int D_, int DV_> struct TallConfig {
  static constexpr int D = D_, DV = DV_, Q_ROWS = backward_q_rows(D, DV), KV_ROWS = backward_kv_rows(D, DV);
  static constexpr int DO_STAGES = D <= 128 ? 2 : 1, DQ_STAGES = D <= 128 ? 2 : 1;
  static constexpr int HELPER_REGISTERS = 24, CONSUMER_REGISTERS = 240;  // of 128 and 256 threads; the CTA is launched with 384 x 168
  static constexpr int REDUCE_BYTES = 4096;  // added to dQ and to sums at once: larger ones hold up the loads of the next tiles
  // Swizzled panels of 64 columns; the last may be zeros in part.
  static constexpr int PANELS = (D + 63) / 64, WIDTH = 64 * PANELS, V_WIDTH = (DV + 63) / 64 * 64;
  // With D = 64 a warpgroup computes dQ^T for half of the Q rows, else dQ for 64 of the columns.
  static constexpr bool DQ_TRANSPOSED = D == 64;
  static constexpr int SCORE_REGISTERS = Q_ROWS / 2;  // S^T and dP^T: 64 x Q_ROWS per warpgroup
  static constexpr int DQ_REGISTERS = Q_ROWS * WIDTH / 256;
  static constexpr int K_BYTES = KV_ROWS * WIDTH * 2, V_BYTES = KV_ROWS * V_WIDTH * 2, Q_BYTES = Q_ROWS * WIDTH * 2;
  static constexpr int DO_BYTES = Q_ROWS * V_WIDTH * 2, DS_BYTES = Q_ROWS * KV_ROWS * 2, OUT_BYTES = V_BYTES;
  static constexpr int DQ_BYTES = Q_ROWS * WIDTH * 4, ROW_BYTES = Q_ROWS * 4;
  static constexpr int ROLE_WARPS = 8;  // every warp has a share of everything
  static constexpr int KV_PANEL = KV_ROWS * PANEL_ROW, Q_PANEL = Q_ROWS * PANEL_ROW;

  struct Tiles {
    unsigned char k[K_BYTES], v[V_BYTES];
    unsigned char q[STAGES][Q_BYTES], grad_out[DO_STAGES][DO_BYTES];
    unsigned char ds[STAGES][DS_BYTES];
    unsigned char dq[DQ_STAGES][DQ_BYTES];
  };
  // dV, then dK, leave through the dS buffers, so that the next K and V can load meanwhile.
  static constexpr int OUT = OFFSET_OF(Tiles, ds);
  static_assert(STAGES * DS_BYTES >= OUT_BYTES, "dK and dV leave through the dS buffers");

  // A dQ tile leaves at once, through the staging buffer of its stage, or the only one. DQ_FULLS: barriers per stage.
  static constexpr int DQ_PIECES = 1, DQ_FULLS = 1;
  DEVICE static constexpr int piece_warpgroup(int) { return 0; }  // both
  DEVICE static constexpr int dq_staging(int stage, int) { return OFFSET_OF(Tiles, dq) + (DQ_STAGES == 2 ? stage : 0) * DQ_BYTES; }
  DEVICE static constexpr int piece_bytes(int) { return DQ_BYTES; }
  DEVICE static constexpr int piece_offset(int) { return 0; }
  DEVICE static constexpr u32 piece_phase(int, u32 use) { return use & 1; }
  DEVICE static constexpr u32 piece_empty(int stage, int) { return stage; }
  // Column n of a warpgroup's part of dQ: a panel, or, with D = 192, the first or last panel and half of the middle one.
  DEVICE static int dq_column(int wg, int n) { return D <= 128 || n < 64 ? wg * (WIDTH - 64) + n : wg * 32 + n; }

  // dV and dK that go to sums leave as they are in registers, through the dQ buffers: four equal pieces. Each stage has two, so that a
  // chain leaves both in the phase of its last step.
  static constexpr int SUM_PIECES = 4, SUM_REGISTERS = (D + DV) / 8, SUM_FLOATS = 2 * WARPGROUP * SUM_REGISTERS;
  static_assert(4 * SUM_FLOATS <= DQ_BYTES && SUM_REGISTERS % 4 == 0, "a piece fits a dQ buffer");
  static_assert(DQ_BYTES % REDUCE_BYTES == 0 && 4 * SUM_FLOATS % REDUCE_BYTES == 0, "whole reduces");
  // With narrow values, P and so dV are lifted by a power of two (NarrowValueConsumer). Whoever ends a chain drops it again, exactly.
  static constexpr float DV_FACTOR = D <= 128 ? 1.f : 1.f / 4096;
  DEVICE static constexpr bool of_dv(int quad) {  // a float4 of a state or sum
    return quad / (SUM_FLOATS / 4) * SUM_REGISTERS + quad % (SUM_FLOATS / 8) / WARPGROUP * 4 < DV / 2;
  }
};

// Beyond: accumulators of 64 KV rows fill the registers, so the warpgroups share the work: the first has S, P and dV, the second
// dP, dS and dK. P goes from one to the other in fp32, in fragment order. Of dQ each has half of the columns: a panel of its own
// and the inner panel next to it, or, with D = 192, half of the one inner panel. They leave one after the other, through 16 KB.
template <int D_> struct WideConfig {
  static constexpr int D = D_, Q_ROWS = backward_q_rows(D, D), KV_ROWS = backward_kv_rows(D, D), DO_STAGES = D == 192 ? 2 : 1;
  static constexpr int HELPER_REGISTERS = D == 192 ? 40 : 24, CONSUMER_REGISTERS = D == 192 ? 232 : 240;
  static constexpr int REDUCE_BYTES = 8192;  // half the reduces of 4096 are worth more here than loads that wait less
  static constexpr int PANELS = D / 64, WIDTH = D, INNER = D / 2 - 64;  // INNER: columns of a warpgroup in inner panels
  static constexpr int KV_BYTES = KV_ROWS * D * 2, Q_BYTES = Q_ROWS * D * 2, DS_BYTES = Q_ROWS * KV_ROWS * 2, ROW_BYTES = Q_ROWS * 4;
  static constexpr int OWN_BYTES = Q_ROWS * 64 * 4, INNER_BYTES = Q_ROWS * INNER * 4;  // of dQ
  static constexpr int KV_PANEL = KV_ROWS * PANEL_ROW, Q_PANEL = Q_ROWS * PANEL_ROW;
  static constexpr int ROLE_WARPS = 4;  // S, P, dS and dQ are in one warpgroup's hands

  struct Tiles {
    unsigned char k[KV_BYTES], v[KV_BYTES];
    unsigned char q[STAGES][Q_BYTES], grad_out[DO_STAGES][Q_BYTES];
    unsigned char p[2 * DS_BYTES], ds[STAGES][DS_BYTES];
    unsigned char dq[2][OWN_BYTES];
  };
  static constexpr int P = OFFSET_OF(Tiles, p);
  // dV leaves through the P buffer, dK through the dS buffers, some panels at a time.
  static constexpr int OUT_PANELS = 2 * DS_BYTES / KV_PANEL;
  static_assert(D == 192 || D == 256, "whole inner panels, or two halves of one");
  DEVICE static int own_column(int wg) { return wg * (D - 64); }
  DEVICE static int inner_column(int wg) { return 64 + wg * INNER; }

  // A dQ tile leaves in four pieces, as they become ready: own and inner columns of the first warpgroup, then of the second.
  static constexpr int DQ_PIECES = 4, DQ_FULLS = 2;
  static_assert(OWN_BYTES % REDUCE_BYTES == 0 && INNER_BYTES % REDUCE_BYTES == 0, "whole reduces");
  DEVICE static constexpr int piece_warpgroup(int piece) { return piece >> 1; }
  DEVICE static constexpr int dq_staging(int, int piece) { return OFFSET_OF(Tiles, dq) + (piece >> 1) * OWN_BYTES; }
  DEVICE static constexpr int piece_bytes(int piece) { return piece & 1 ? INNER_BYTES : OWN_BYTES; }
  DEVICE static constexpr int piece_offset(int piece) { return (piece >> 1) * (OWN_BYTES + INNER_BYTES) + (piece & 1) * OWN_BYTES; }
  DEVICE static constexpr u32 piece_phase(int piece, u32) { return piece & 1; }
  DEVICE static constexpr u32 piece_empty(int, int piece) { return piece >> 1; }

  // dV and dK that go to sums leave as dQ does: half of the first warpgroup's dV beside half of the second's dK, then the others.
  static constexpr int SUM_PIECES = 2, SUM_REGISTERS = D / 4, SUM_FLOATS = KV_ROWS * D;
  static_assert(KV_ROWS == Q_ROWS, "both halves together have the size of a dQ tile");
  static constexpr float DV_FACTOR = 1.f;
  DEVICE static constexpr bool of_dv(int quad) { return quad % (SUM_FLOATS / 4) < SUM_FLOATS / 8; }
};

// Where registers `first` to `first + 3` of a warpgroup's sums are in a state, as it leaves in pieces: a float4, of the first thread.
template <typename C> DEVICE constexpr int state_quad(int wg, int first) {
  static_assert(C::SUM_FLOATS == 2 * WARPGROUP * C::SUM_REGISTERS, "a piece has registers of both warpgroups");
  return first / C::SUM_REGISTERS * (C::SUM_FLOATS / 4) + wg * (C::SUM_FLOATS / 8) + first % C::SUM_REGISTERS / 4 * WARPGROUP;
}

// What the planner tells the other roles about a step: first query, whether elements must be masked, query head, dQ tile, turn.
struct StepNote {
  int rows;  // what a consumer wants, in one word
  int q_head, dq_tile, turn;
  static DEVICE int pack_rows(int q_row, int partial) { return 2 * q_row + partial; }  // MaskKind::Bits: see BitTables instead
  DEVICE int q_row() const { return rows >> 1; }
  DEVICE bool partial() const { return rows & 1; }
};

// The shared memory of a CTA.
template <typename Config> struct BackwardStorage {
  typename Config::Tiles tiles;
  float lse[STAGES][Config::Q_ROWS], delta[Config::DO_STAGES][Config::Q_ROWS];
  StepNote step_notes[NOTES];
  ChainRecord chain_notes[2];
  u64 barriers[44];
};

template <int D, int DV, bool TALL = is_tall(DV)> struct ConfigOf : TallConfig<D, DV> {};
template <int D, int DV> struct ConfigOf<D, DV, false> : WideConfig<D> {};
template <int D, int DV = D> struct BackwardConfig : ConfigOf<D, DV> {
  using Storage = BackwardStorage<ConfigOf<D, DV>>;
  static constexpr int V_PANELS = (DV + 63) / 64;
  // Which panel of K lies where. Last is the one of which both warpgroups have a half (dq_column).
  DEVICE static constexpr int k_panel(int place) { return is_tall(DV) && D == 192 && place > 0 ? 3 - place : place; }
  // Byte offsets. Code computes with addresses in the shared window, which fit one register; pointers take two.
  static constexpr int K = OFFSET_OF(Storage, tiles.k), V = OFFSET_OF(Storage, tiles.v);
  static constexpr int Q = OFFSET_OF(Storage, tiles.q), DO = OFFSET_OF(Storage, tiles.grad_out);
  static constexpr int DS = OFFSET_OF(Storage, tiles.ds), DQ = OFFSET_OF(Storage, tiles.dq);
  static constexpr int LSE = OFFSET_OF(Storage, lse), DELTA = OFFSET_OF(Storage, delta);
  static constexpr int STEP_NOTES = OFFSET_OF(Storage, step_notes), CHAIN_NOTES = OFFSET_OF(Storage, chain_notes);
  static constexpr int BARRIERS = OFFSET_OF(Storage, barriers), SHARED_BYTES = sizeof(Storage);
  static_assert(SHARED_BYTES == backward_shared_bytes(D, DV), "Python asks for other shared memory");
  static_assert(SHARED_BYTES <= MOST_SHARED_BYTES, "shared memory of one SM");
};

// Barriers of warps (bar.sync has 16): of both warpgroups of consumers, or of one.
enum NamedBarrier : int { BOTH = 1, FIRST_HALF = 2, SECOND_HALF = 3 };

constexpr int CONSUMER_WARPS = 8, DRAINS = 2, LOADERS = 1;

// The barriers, one behind the other. FULL: written, may be read. EMPTY: read, may be overwritten. `shared`: address of the storage.
template <typename C> struct Barriers {
  u32 shared;

  DEVICE Barrier chain_full(u32 slot) const { return at(0)[slot]; }  // the note of a chain
  DEVICE Barrier chain_empty(u32 slot) const { return at(2)[slot]; }  // all roles have finished a chain
  DEVICE Barrier chain_loaded() const { return at(4); }  // every tile of a chain has been asked for
  DEVICE Barrier k_full() const { return at(5); }
  DEVICE Barrier v_full() const { return at(6); }
  DEVICE Barrier kv_empty() const { return at(7); }
  DEVICE Barrier q_full(u32 stage) const { return at(8)[stage]; }  // Q, LSE and the step's note
  DEVICE Barrier q_empty(u32 stage) const { return at(10)[stage]; }
  DEVICE Barrier do_full(u32 stage) const { return at(12)[stage]; }  // [DO_STAGES] dO and delta
  DEVICE Barrier do_empty(u32 stage) const { return at(14)[stage]; }
  DEVICE Barrier p_full() const { return at(16); }  // wide heads
  DEVICE Barrier p_empty() const { return at(17); }
  DEVICE Barrier ds_full(u32 stage) const { return at(18)[stage]; }
  DEVICE Barrier ds_empty(u32 stage) const { return at(20)[stage]; }
  DEVICE Barrier dq_full(u32 stage, u32 wg = 0) const { return at(22)[stage * C::DQ_FULLS + wg]; }  // wide heads: by stage and warpgroup
  DEVICE Barrier dq_empty(u32 stage_or_wg) const { return at(26)[stage_or_wg]; }  // by stage; wide heads: by warpgroup
  DEVICE Barrier note_full(u32 number) const { return at(28)[number % NOTES]; }  // the note of a step
  DEVICE Barrier note_empty(u32 number) const { return at(36)[number % NOTES]; }

  DEVICE void init() const {
    for (int s = 0; s < STAGES; s++) {
      chain_full(s).init(1);
      chain_empty(s).init(CONSUMER_WARPS + DRAINS + LOADERS);
      q_full(s).init(1);
      q_empty(s).init(C::ROLE_WARPS);
      do_full(s).init(1);
      do_empty(s).init(CONSUMER_WARPS);
      ds_full(s).init(C::ROLE_WARPS);
      ds_empty(s).init(CONSUMER_WARPS);
      for (int wg = 0; wg < C::DQ_FULLS; wg++) dq_full(s, wg).init(C::ROLE_WARPS);
      dq_empty(s).init(1);
    }
    for (int n = 0; n < NOTES; n++) {
      note_full(n).init(1);
      note_empty(n).init(1);
    }
    p_full().init(C::ROLE_WARPS);
    p_empty().init(C::ROLE_WARPS);
    chain_loaded().init(1);
    k_full().init(1);
    v_full().init(1);
    kv_empty().init(CONSUMER_WARPS);
    mbarrier_init_fence();
    fence_async_all();
  }

 private:
  DEVICE Barrier at(u32 number) const { return {shared + C::BARRIERS + 8 * number}; }
};

// Every role counts chains and steps the same way. A chain always starts at stage 0; the phase of a stage's barriers
// flips each time the stage is used, so an odd chain leaves the two stages with different phases.
struct Pipeline {
  u32 chain = 0;      // chains done
  u32 steps = 0;      // steps done, over all chains
  u32 flips[2] = {0, 0};

  DEVICE u32 chain_slot() const { return chain & 1; }
  DEVICE u32 chain_phase() const { return (chain >> 1) & 1; }
  template <int STAGE> DEVICE u32 phase(int step) const { return ((u32)(step >> 1) + flips[STAGE]) & 1; }
  DEVICE u32 phase(int step) const { return ((u32)(step >> 1) + (step & 1 ? flips[1] : flips[0])) & 1; }
  DEVICE void finish_chain(int count, int more_notes = 0) {
    chain++;
    steps += count + more_notes;
    flips[0] += (count + 1) >> 1;
    flips[1] += count >> 1;
  }
};

// Steps behind those of a chain, in which dK and dV go to sums; none, where chains finish them.
template <typename C> DEVICE int sum_pieces(const BackwardParams& p) { return p.sums != nullptr ? C::SUM_PIECES : 0; }

// What the planner tells the other roles about a chain: the first words of its record. Row r of its sequence is at TMA coordinates
// (r + shift, plane).
struct ChainNote {
  int kv_head, kv_row, kv_plane, steps;
  int q_shift, q_plane, keys, band_top;
};

// The notes in shared memory, seen by every role. A chain's is its whole record; the last eight words are the planner's own.
template <typename C> struct Notes {
  u32 shared;

  DEVICE u32 chain_at(u32 slot) const { return shared + C::CHAIN_NOTES + (u32)sizeof(ChainRecord) * slot; }
  DEVICE u32 step_at(u32 step) const { return shared + C::STEP_NOTES + (u32)sizeof(StepNote) * (step % NOTES); }
  DEVICE void await_chain(const Pipeline& pipe) const { Barriers<C>{shared}.chain_full(pipe.chain_slot()).wait(pipe.chain_phase()); }
  // The parts of a chain's note are read where they are needed: registers are scarcer than shared-memory loads.
  DEVICE ChainNote chain(const Pipeline& pipe) const {
    const int4 v = load_shared_i32x4(chain_at(pipe.chain_slot()));
    return {v.x, v.y, v.z, v.w};
  }
  DEVICE int q_shift(const Pipeline& pipe) const { return word(pipe, OFFSET_OF(ChainRecord, q_shift)); }
  DEVICE int q_plane(const Pipeline& pipe) const { return word(pipe, OFFSET_OF(ChainRecord, q_plane)); }
  DEVICE int keys(const Pipeline& pipe) const { return word(pipe, OFFSET_OF(ChainRecord, keys)); }
  // Where notes have the number of a tile's bits instead of its first row (MaskKind::Bits).
  DEVICE int q_tile(const Pipeline& pipe, const StepNote& note, int head_tiles) const {
    const int member = note.q_head - word(pipe, OFFSET_OF(ChainRecord, q_head));
    return note.dq_tile - word(pipe, OFFSET_OF(ChainRecord, first_dq_tile)) - member * head_tiles;
  }
  DEVICE int first_sum(const Pipeline& pipe) const { return word(pipe, OFFSET_OF(ChainRecord, first_sum)); }
  template <MaskKind MASK> DEVICE int mask_from(const Pipeline& pipe) const {
    return word(pipe, is_band(MASK) ? OFFSET_OF(ChainRecord, band_top) : OFFSET_OF(ChainRecord, kv_row));
  }
  DEVICE StepNote step(u32 step) const {
    const int4 v = load_shared_i32x4(step_at(step));
    return {v.x, v.y, v.z, v.w};
  }

 private:
  DEVICE int word(const Pipeline& pipe, u32 offset) const { return load_shared_i32(chain_at(pipe.chain_slot()) + offset); }
};
static_assert(OFFSET_OF(ChainRecord, kv_head) == 0 && OFFSET_OF(ChainRecord, steps) == 12, "a note is read as four words");

// What a kernel is made for. The templates below make the rarer choices.
template <typename Half_, int D_, int DV_, bool SOFTCAP_, MaskKind MASK_> struct BackwardVariant {
  using Half = Half_;
  using C = BackwardConfig<D_, DV_>;
  using More = ModifierParams;
  static constexpr int D = D_, DV = DV_;
  static constexpr MaskKind MASK = MASK_;
  static constexpr bool SOFTCAP = SOFTCAP_, PACKED = MASK == MaskKind::Packed;
  static constexpr bool ORDERED = true, RECORD = false, LEGS = false, DROPOUT = false, ALIBI = false;
};
template <typename V, bool ORDERED_, bool RECORD_> struct Plain : V {
  static constexpr bool ORDERED = ORDERED_, RECORD = RECORD_;
};
template <typename V> struct OfLegs : V {
  using More = LegParams;
  static constexpr bool LEGS = true;
};
template <typename V, bool DROPOUT_, bool ALIBI_> struct Modified : V {
  static constexpr bool DROPOUT = DROPOUT_, ALIBI = ALIBI_;
};

struct BackwardMaps {
  const TensorMap *q, *k, *v, *grad_out, *dk, *dv;
};

// What every role knows.
template <typename V> struct Role {
  const BackwardParams& p;
  u32 shared;
  const typename V::More* more;  // of legs, or of dropout and ALiBi
  Notes<typename V::C> notes{shared};
  Barriers<typename V::C> bars{shared};
};
