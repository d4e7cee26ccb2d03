// The consumers of heads whose keys are wide and whose values are not (TallConfig beyond D = 128). As Consumer, but the
// accumulators leave room for one tile of scores only: S becomes P in 16 bits before dP is there, and dS is made from those; dQ
// comes in two pieces, a panel of a warpgroup's own and half of the middle one.
#pragma once
#include "backward/config.cuh"
#include "backward/elementwise.cuh"
#include "common/wgmma.cuh"

template <typename Half, int D, int DV, bool SOFTCAP, MaskKind MASK> struct NarrowValueConsumer {
  using C = BackwardConfig<D, DV>;
  static constexpr int Q_ROWS = C::Q_ROWS, KV_ROWS = C::KV_ROWS, SCORES = C::SCORE_REGISTERS, PAIRS = SCORES / 2, GROUPS = SCORES / 4;
  static constexpr int EARLY_LSE = 4, EARLY_DELTA = 2;  // groups loaded while the product before them still runs
  static constexpr int OWN = 32, INNER = C::INNER / 2;  // registers of dQ: a panel of its own, half of the middle one

  const BackwardParams& p;
  Notes<C> notes;
  Barriers<C> bars;
  u32 shared;
  int wg;
  u32 thread;  // of the warpgroup; what follows from it is computed anew where it is needed, as registers are scarce
  int left;  // steps of the chain
  float dk[D / 2], dv[DV / 2], s[SCORES];

  DEVICE NarrowValueConsumer(const BackwardParams& params, u32 shared_base, int warp_of_block, int lane_of_warp)
      : p(params), notes{shared_base}, bars{shared_base}, shared(shared_base), wg(warp_of_block / 4 - 1),
        thread(warp_of_block % 4 * WARP + lane_of_warp) {}

  DEVICE void run(const TensorMap* dk_map, const TensorMap* dv_map) {
    Progress at;
    while (true) {
      notes.await_chain(at.chain());
      left = notes.chain(at.chain()).steps;
      if (left < 0) break;
      clear(dk);
      clear(dv);
      if (left > 0) {
        walk_chain(at);
        arrive(bars.kv_empty());
        at.bits ^= Progress::KV;
      }
      store_tile<0, DV>(dv, 1.f, dv_map, notes.chain(at.chain()));
      store_tile<0, 128>(dk, p.scale, dk_map, notes.chain(at.chain()));
      store_tile<128, D>(dk, p.scale, dk_map, notes.chain(at.chain()));
      arrive(bars.chain_empty(at.chain().chain_slot()));
      at.finish_chain();
    }
    if (elects()) bulk_wait();
  }

 private:
  // Pipeline in one register: phases of both stages, phase of K and V, chains modulo 4, steps.
  struct Progress {
    enum : u32 { KV = 4, CHAIN = 8, CHAINS = 24, STEP = 32 };
    u32 bits = 0;
    DEVICE Pipeline chain() const { return {bits / CHAIN % 4}; }
    DEVICE u32 number() const { return bits / STEP; }
    DEVICE u32 kv_phase() const { return bits / KV & 1; }
    template <int STAGE> DEVICE u32 phase() const { return bits >> STAGE & 1; }
    template <int STAGE> DEVICE void finish_step() { bits = (bits ^ 1 << STAGE) + STEP; }
    DEVICE void finish_chain() { bits = bits & ~CHAINS | bits + CHAIN & CHAINS; }
  };
  // For matrix descriptors. Were it the same for all steps, the assembler would keep every descriptor in a register of its own.
  DEVICE u32 base() const { return (shared >> 4) + (opaque(left) >> 31); }
  DEVICE bool elects() const { return thread == 0; }

  template <int N> DEVICE void clear(float (&tile)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) tile[i] = 0.f;
  }
  DEVICE void arrive(Barrier barrier) {
    __syncwarp();
    if (thread % WARP == 0) barrier.arrive();
  }
  // What this warp has stored may be read by wgmma and TMA. The fence waits until the stores have landed, so it comes a while
  // after them, behind the next products.
  DEVICE void publish(Barrier barrier) {
    fence_async_shared();
    arrive(barrier);
  }

  DEVICE void walk_chain(Progress& at) {
    bars.k_full().wait(at.kv_phase());
    step<0, true>(at);
#pragma unroll 1
    while (left > 1) {
      step<1, false>(at);
      step<0, false>(at);
    }
    if (left > 0) {
      step<1, false>(at);
      finish<1>(at);
    } else {
      finish<0>(at);
    }
  }

  // One Q tile. STAGE is its parity. No product runs on into the next step: while this warpgroup waits, the other one's products run.
  template <int STAGE, bool FIRST> DEVICE void step(Progress& at) {
    constexpr int OTHER = STAGE ^ 1;
    bars.q_full(STAGE).wait(at.template phase<STAGE>());
    multiply_s<STAGE>();
    const int rows = load_shared_i32(notes.step_at(at.number()));
    float2 lse[EARLY_LSE];
#pragma unroll
    for (int g = 0; g < EARLY_LSE; g++) lse[g] = row_pair(C::LSE + STAGE * C::ROW_BYTES, g);
    wgmma_wait<0>();  // S
    pin(s);
    if constexpr (SOFTCAP) cap_scores(s, p.cap_scale);
    mask_partial(rows, at);
    u32 probability[PAIRS], sloped[PAIRS];
    exponentiate<STAGE>(lse, probability, sloped);
    if constexpr (FIRST) bars.v_full().wait(at.kv_phase());
    bars.do_full(0).wait(at.number() & 1);
    multiply_dv(probability);  // before dP: else the assembler lets exponentials wait behind dP, and spills
    float dp[SCORES];
    if constexpr (SOFTCAP) wgmma_wait<0>();  // the slopes take the registers of P
    multiply_dp(dp);
    float2 delta[EARLY_DELTA];
#pragma unroll
    for (int g = 0; g < EARLY_DELTA; g++) delta[g] = row_pair(C::DELTA, g);
    wgmma_wait<0>();
    pin(dp);
    u32 ds[PAIRS];
    differentiate(delta, SOFTCAP ? sloped : probability, dp, ds);
    arrive(bars.do_empty(0));
    if constexpr (FIRST) await_stored();
    put_ds<STAGE>(ds, at.template phase<STAGE>());
    float dq_own[OWN], dq_inner[INNER];
    if constexpr (!FIRST) {
      bars.ds_full(OTHER).wait(at.template phase<OTHER>() ^ 1);
      multiply_dq<OTHER>(dq_own, own_offset());
    }
    multiply_dk<STAGE>(ds);
    publish(bars.ds_full(STAGE));
    if constexpr (!FIRST) {
      wgmma_wait<1>();  // dQ of the step before, own columns
      pin(dq_own);
      await_staging<OTHER>(at);
      put_dq<0>(dq_own);
    }
    wgmma_wait<0>();  // dK
    arrive(bars.q_empty(STAGE));
    if constexpr (!FIRST) {
      multiply_dq<OTHER>(dq_inner, inner_offset());
      wgmma_wait<0>();
      pin(dq_inner);
      arrive(bars.ds_empty(OTHER));
      put_dq<C::OWN_BYTES>(dq_inner);
      publish(bars.dq_full(OTHER));
    } else {
      bars.dq_empty(STAGE).wait(at.template phase<STAGE>() ^ 1);  // the chain before may have ended in either stage
    }
    at.template finish_step<STAGE>();
    left--;
  }

  // dQ of the last step.
  template <int STAGE> DEVICE void finish(const Progress& at) {
    bars.ds_full(STAGE).wait(at.template phase<STAGE>() ^ 1);
    float dq_own[OWN], dq_inner[INNER];
    multiply_dq<STAGE>(dq_own, own_offset());
    multiply_dq<STAGE>(dq_inner, inner_offset());
    wgmma_wait<0>();
    pin(dq_own);
    pin(dq_inner);
    arrive(bars.ds_empty(STAGE));
    await_staging<STAGE>(at);
    put_dq<0>(dq_own);
    put_dq<C::OWN_BYTES>(dq_inner);
    publish(bars.dq_full(STAGE));
  }

  // ---- the five products
  template <int STAGE> DEVICE void multiply_s() {  // S^T = K Q^T
    const u32 b = base(), a = b + wg * (HALF_PANEL / DESCRIPTOR_UNIT);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < D / 16; k++)
      wgmma_ss<Half, 0, 0>(
          k > 0, s, descriptor(a + descriptor_low(C::K + (k / 4) * C::KV_PANEL + (k % 4) * SIXTEEN_COLUMNS)),
          descriptor(b + descriptor_low(C::Q + STAGE * C::Q_BYTES + (k / 4) * C::Q_PANEL + (k % 4) * SIXTEEN_COLUMNS)));
    wgmma_commit();
  }
  DEVICE void multiply_dp(float (&dp)[SCORES]) {  // dP^T = V dO^T
    const u32 b = base(), a = b + wg * (HALF_PANEL / DESCRIPTOR_UNIT);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < DV / 16; k++)
      wgmma_ss<Half, 0, 0>(k > 0, dp, descriptor(a + descriptor_low(C::V + (k / 4) * C::KV_PANEL + (k % 4) * SIXTEEN_COLUMNS)),
                           descriptor(b + descriptor_low(C::DO + (k / 4) * C::Q_PANEL + (k % 4) * SIXTEEN_COLUMNS)));
    wgmma_commit();
  }
  DEVICE void multiply_dv(const u32 (&probability)[PAIRS]) { multiply_rows(dv, probability, C::DO); }  // dV += P^T dO
  template <int STAGE> DEVICE void multiply_dk(const u32 (&ds)[PAIRS]) { multiply_rows(dk, ds, C::Q + STAGE * C::Q_BYTES); }  // dK += dS^T Q
  template <int N> DEVICE void multiply_rows(float (&d)[N], const u32 (&a)[PAIRS], int rows) {
    const u32 b = base();
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Q_ROWS / 16; k++) wgmma_rs<Half, 1>(d, a + 4 * k, descriptor(b + descriptor_low(rows + k * SIXTEEN_ROWS, C::Q_PANEL)));
    wgmma_commit();
  }
  template <int STAGE, int N> DEVICE void multiply_dq(float (&d)[N], u32 columns) {  // dQ = dS K
    const u32 a = base(), b = a + columns;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < KV_ROWS / 16; k++)
      wgmma_ss<Half, 0, 1>(
          k > 0, d, descriptor(a + descriptor_low(C::DS + STAGE * C::DS_BYTES + (k / 4) * C::Q_PANEL + (k % 4) * SIXTEEN_COLUMNS)),
          descriptor(b + descriptor_low(C::K + k * SIXTEEN_ROWS)));
    wgmma_commit();
  }
  DEVICE u32 own_offset() { return C::own_panel(wg) * (C::KV_PANEL / DESCRIPTOR_UNIT); }
  DEVICE u32 inner_offset() { return C::KV_PANEL / DESCRIPTOR_UNIT + wg * (C::INNER * 2 / DESCRIPTOR_UNIT); }

  // ---- element-wise work (backward/elementwise.cuh)
  DEVICE float2 row_pair(int rows, int g) { return load_shared_f32x2(shared + rows + (thread & 3) * 8 + g * 32); }

  DEVICE void mask_partial(int rows, const Progress& at) {
    const StepNote note{rows};
    if (!note.partial()) return;
    const int keys = notes.keys(at.chain()), from = notes.template mask_from<MASK>(at.chain());
    const u32 own = opaque(thread), lane = own % WARP, warp = own / WARP;
    const int local = wg * 64 + warp * 16 + (lane >> 2);
    const KeyMask<MASK> low(local, keys, from), high(local + 8, keys, from);
    const int query = note.q_row() + 2 * (lane & 3);
    mask_scores(s, p.mask, low, high, query, p.masked_score);
  }
  template <int STAGE> DEVICE void exponentiate(const float2 (&early)[EARLY_LSE], u32 (&probability)[PAIRS], u32 (&sloped)[PAIRS]) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      const float2 lse = g < EARLY_LSE ? early[g < EARLY_LSE ? g : 0] : row_pair(C::LSE + STAGE * C::ROW_BYTES, g);
      exponentiate_group<Half, SOFTCAP>(s + 4 * g, lse, p.scale_log2, probability + 2 * g);
      if constexpr (SOFTCAP) {
        sloped[2 * g] = pack<Half>(s[4 * g], s[4 * g + 1]);
        sloped[2 * g + 1] = pack<Half>(s[4 * g + 2], s[4 * g + 3]);
      }
    }
  }
  DEVICE void differentiate(const float2 (&early)[EARLY_DELTA], const u32 (&weights)[PAIRS], const float (&dp)[SCORES], u32 (&ds)[PAIRS]) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      const float2 delta = g < EARLY_DELTA ? early[g < EARLY_DELTA ? g : 0] : row_pair(C::DELTA, g);
      const float2 low = unpack<Half>(weights[2 * g]), high = unpack<Half>(weights[2 * g + 1]);
      const float weight[4] = {low.x, low.y, high.x, high.y};
      differentiate_group<Half>(weight, dp + 4 * g, delta, ds + 2 * g);
    }
  }

  // ---- what leaves the registers
  template <int STAGE> DEVICE void put_ds(const u32 (&ds)[PAIRS], u32 phase) {  // [query][key], one panel of 64 keys per warpgroup
    bars.ds_empty(STAGE).wait(phase ^ 1);
    const u32 own = opaque(thread), lane = own % WARP, warp = own / WARP;
    const int chunk = (2 * warp + ((lane >> 3) & 1)) ^ (lane & 7);
    const u32 at = shared + C::DS + STAGE * C::DS_BYTES + wg * C::Q_PANEL + ((lane >> 4) * 8 + (lane & 7)) * PANEL_ROW + chunk * 16;
#pragma unroll
    for (int k = 0; k < Q_ROWS / 16; k++)
      stmatrix_transposed(at + k * SIXTEEN_ROWS, ds[4 * k], ds[4 * k + 1], ds[4 * k + 2], ds[4 * k + 3]);
  }
  // There is one staging buffer: before dQ of a step of STAGE comes, that of the step before must have left.
  template <int STAGE> DEVICE void await_staging(const Progress& at) {
    bars.dq_empty(STAGE ^ 1).wait(at.template phase<STAGE ^ 1>() ^ 1);
  }
  template <int AT, int N> DEVICE void put_dq(const float (&d)[N]) {  // fragment order: the postprocess kernel unscrambles
    const u32 at = shared + C::DQ + AT + wg * (N * WARPGROUP * 4) + opaque(thread) * 16;
#pragma unroll
    for (int i = 0; i < N / 4; i++) store_shared_f32x4(at + i * (WARPGROUP * 16), d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]);
  }
  // dK and dV leave through the dS buffers: nobody may write there before the last store has read them, and no store
  // before both warpgroups are done with dS.
  DEVICE void await_stored() {
    if (elects()) bulk_wait_read();
    named_barrier_sync<BOTH>(2 * WARPGROUP);
  }
  // Some columns of a finished half of dK or dV, through this warpgroup's part of the dS buffers.
  template <int COLUMN, int END, int N> DEVICE void store_tile(float (&tile)[N], float factor, const TensorMap* map, const ChainNote& chain) {
    await_stored();
    const u32 own = opaque(thread), lane = own % WARP, warp = own / WARP;
#pragma unroll
    for (int g = 0; g < (END - COLUMN) / 16; g++) {
      const float* x = tile + COLUMN / 2 + 8 * g;
      u32 r[4];
#pragma unroll
      for (int i = 0; i < 4; i++) r[i] = pack<Half>(x[2 * i] * factor, x[2 * i + 1] * factor);
      const int row = warp * 16 + (lane & 15), chunk = (2 * (g % 4) + (lane >> 4)) ^ (lane & 7);
      stmatrix(shared + C::OUT + wg * (C::OUT_BYTES / 2) + (g / 4) * HALF_PANEL + row * PANEL_ROW + chunk * 16, r[0], r[1], r[2], r[3]);
    }
    fence_async_shared();
    wg == 0 ? named_barrier_sync<FIRST_HALF>(WARPGROUP) : named_barrier_sync<SECOND_HALF>(WARPGROUP);
    if (elects()) {
      for (int i = 0; i < (END - COLUMN) / 64; i++)
        tma_store<MASK == MaskKind::Packed>(map, shared + C::OUT + wg * (C::OUT_BYTES / 2) + i * HALF_PANEL, COLUMN + i * 64, chain.kv_head,
                                            chain.kv_row + wg * 64, chain.kv_plane);
      bulk_commit();
    }
  }
};
