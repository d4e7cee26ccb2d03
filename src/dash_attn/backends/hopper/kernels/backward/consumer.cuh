// Two warpgroups, 64 KV rows each: the five products of a task. P^T and dS^T stay in registers as the A operand of
// dV += P^T dO and dK += dS^T Q; dS goes through shared memory for dQ = dS K, delayed by one step so that no warpgroup
// waits for the other's half of dS.
#pragma once
#include "backward/config.cuh"
#include "backward/elementwise.cuh"
#include "backward/modified_elements.cuh"
#include "common/wgmma.cuh"

template <typename Half, int D, bool SOFTCAP, MaskKind MASK, bool LEGS = false, bool DROPOUT = false, bool ALIBI = false> struct Consumer {
  using C = BackwardConfig<D>;
  using Bits = OwnBits<MASK, C::SCORE_REGISTERS, 2 * WARPGROUP>;
  static constexpr bool EARLY_BITS = MASK == MaskKind::Bits && !SOFTCAP;  // while S is computed, likewise
  static constexpr int Q_ROWS = C::Q_ROWS, KV_ROWS = C::KV_ROWS, SCORES = C::SCORE_REGISTERS, PAIRS = SCORES / 2, GROUPS = SCORES / 4;
  static constexpr bool READS_NOTE_EARLY = (Q_ROWS == 64 || is_band(MASK) || EARLY_BITS) && !DROPOUT;  // while S is computed; a register
  // Groups of LSE and delta loaded while the product before them still runs; more would spill.
  static constexpr bool FEWER = SOFTCAP || DROPOUT;
  static constexpr bool DP_LATE = DROPOUT && Q_ROWS == 128;  // behind the element-wise work of S, which needs the registers
  static constexpr int EARLY_LSE = Q_ROWS == 64 ? (FEWER ? (MASK == MaskKind::Bits ? 2 : 4) : GROUPS) : FEWER ? 1 : is_band(MASK) ? 6 : 2;
  static constexpr int EARLY_DELTA = Q_ROWS == 64 && !FEWER ? 4 : 1;

  const BackwardParams& p;
  const ModifierParams* m;  // of dropout and ALiBi
  Notes<C> notes;
  Barriers<C> bars;
  u32 shared;
  int wg, warp, lane;     // warp inside the warpgroup
  float dk[D / 2], dv[D / 2];
  float s[SCORES], dp[SCORES], dq[C::DQ_REGISTERS];
  u32 probability[PAIRS], ds[PAIRS];

  DEVICE Consumer(const BackwardParams& params, u32 shared_base, int warp_of_block, int lane_of_warp,
                  const ModifierParams* modifiers = nullptr)
      : p(params), m(modifiers), notes{shared_base}, bars{shared_base}, shared(shared_base), wg(warp_of_block / 4 - 1),
        warp(warp_of_block & 3), lane(lane_of_warp) {}

  // Of legs (backward/legs.cuh), dK and dV begin as states and end as such: there are no maps.
  DEVICE void run(const TensorMap* dk_map, const TensorMap* dv_map, const LegParams* legs = nullptr) {
    Pipeline pipe;
    u32 kv_loads = 0;
    while (true) {
      notes.await_chain(pipe);
      const int steps = notes.chain(pipe).steps;
      if (steps < 0) break;
#pragma unroll
      for (int i = 0; i < D / 2; i++) dk[i] = dv[i] = 0.f;
      if constexpr (LEGS)
        if (legs->states != nullptr) take_state(legs->states, pipe);
      if (steps > 0) {
        walk_chain(steps, pipe, kv_loads & 1);
        arrive(bars.kv_empty());
        kv_loads++;
      }
      if (!LEGS && p.sums == nullptr) {
        store_tile(dv, DROPOUT ? m->rescale : 1.f, dv_map, notes.chain(pipe));
        store_tile(dk, p.scale, dk_map, notes.chain(pipe));
      } else {
        put_sum<0>(steps, pipe);
        put_sum<1>(steps + 1, pipe);
        put_sum<2>(steps + 2, pipe);
        put_sum<3>(steps + 3, pipe);
      }
      arrive(bars.chain_empty(pipe.chain_slot()));
      pipe.finish_chain(steps, sum_pieces<C>(p));
    }
    if (warp == 0 && lane == 0) bulk_wait();
  }

 private:
  DEVICE void arrive(Barrier barrier) {
    __syncwarp();
    if (lane == 0) barrier.arrive();
  }
  // What this warp has stored may be read by wgmma and TMA. The fence waits until the stores have landed, so it comes a while
  // after them, behind the next products.
  DEVICE void publish(Barrier barrier) {
    fence_async_shared();
    arrive(barrier);
  }

  DEVICE void walk_chain(int steps, const Pipeline& pipe, u32 kv_phase) {
    bars.k_full().wait(kv_phase);
    step<0, true, true>(0, pipe, kv_phase);
    int j = 1;
    // Two steps per trip: dK of the first may still run when S of the second is issued, but not over the back edge (ptxas).
    for (; j + 1 < steps; j += 2) {
      step<1, false, false>(j, pipe, kv_phase);
      step<0, false, true>(j + 1, pipe, kv_phase);
    }
    if (j < steps) {
      step<1, false, true>(j, pipe, kv_phase);
      finish<1>(j, pipe);
    } else {
      finish<0>(j - 1, pipe);
    }
  }

  // One Q tile. STAGE is its parity; CLOSE waits for dK, else S of the next step queues behind it.
  template <int STAGE, bool FIRST, bool CLOSE> DEVICE void step(int j, const Pipeline& pipe, u32 kv_phase) {
    constexpr int OTHER = STAGE ^ 1;
    const u32 phase = pipe.template phase<STAGE>(j);
    bars.q_full(STAGE).wait(phase);
    int rows;
    if constexpr (READS_NOTE_EARLY) rows = load_shared_i32(notes.step_at(pipe.steps + j));
    Bits bits;
    if constexpr (EARLY_BITS) bits = bits_of(rows);
    float2 lse[EARLY_LSE];
#pragma unroll
    for (int g = 0; g < EARLY_LSE; g++) lse[g] = row_pair(C::LSE, STAGE, g);
    multiply_s<STAGE>();
    if (!FIRST && j > 1) publish(bars.dq_full(STAGE));  // put there by the step before: its stores have landed by now
    if constexpr (!FIRST) {
      wgmma_wait<1>();  // dK of the step before
      arrive(bars.q_empty(OTHER));
    } else {
      bars.v_full().wait(kv_phase);
    }
    if constexpr (DP_LATE) {
      wgmma_wait<0>();
    } else {
      bars.do_full(STAGE).wait(phase);
      multiply_dp<STAGE>();
      wgmma_wait<1>();  // S
    }
    pin(s);
    if constexpr (!READS_NOTE_EARLY) rows = load_shared_i32(notes.step_at(pipe.steps + j));
    if constexpr (SOFTCAP) cap_scores(s, p.cap_scale);
    if constexpr (MASK == MaskKind::Bits)
      (EARLY_BITS ? bits : bits_of(rows)).apply(s, p.masked_score);
    else
      mask_partial(rows, pipe);
    if constexpr (DROPOUT || ALIBI)
      exponentiate_modified<STAGE>(rows, pipe, lse);
    else
      exponentiate<STAGE>(lse);
    if constexpr (DP_LATE) {
      bars.do_full(STAGE).wait(phase);
      multiply_dp<STAGE>();
    }
    multiply_dv<STAGE>();
    float2 delta[EARLY_DELTA];
#pragma unroll
    for (int g = 0; g < EARLY_DELTA; g++) delta[g] = row_pair(C::DELTA, STAGE, g);
    wgmma_wait<DP_LATE ? 0 : 1>();  // dP
    pin(dp);
    differentiate<STAGE>(delta);
    if constexpr (FIRST) await_stored();
    put_ds<STAGE>(phase);
    if constexpr (!FIRST) {
      bars.ds_full(OTHER).wait(pipe.template phase<OTHER>(j - 1));
      multiply_dq<OTHER>();
    }
    multiply_dk<STAGE>();
    publish(bars.ds_full(STAGE));
    wgmma_wait<1>();  // dV, and dQ of the step before
    arrive(bars.do_empty(STAGE));
    if constexpr (!FIRST) {
      pin(dq);
      arrive(bars.ds_empty(OTHER));
      put_dq<OTHER>(pipe.template phase<OTHER>(j - 1));
    }
    if constexpr (CLOSE) wgmma_wait<0>();
  }

  // dQ of the last step.
  template <int STAGE> DEVICE void finish(int j, const Pipeline& pipe) {
    const u32 phase = pipe.template phase<STAGE>(j);
    arrive(bars.q_empty(STAGE));
    if (j > 0) publish(bars.dq_full(STAGE ^ 1));
    bars.ds_full(STAGE).wait(phase);
    multiply_dq<STAGE>();
    wgmma_wait<0>();
    pin(dq);
    arrive(bars.ds_empty(STAGE));
    put_dq<STAGE>(phase);
    publish(bars.dq_full(STAGE));
  }

  // ---- the five products
  template <int STAGE> DEVICE void multiply_s() {  // S^T = K Q^T
    const u32 b = opaque(shared >> 4), a = b + wg * (HALF_PANEL / DESCRIPTOR_UNIT);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < D / 16; k++)
      wgmma_ss<Half, 0, 0>(k > 0, s, descriptor(a + descriptor_low(C::K + (k / 4) * C::KV_PANEL + (k % 4) * SIXTEEN_COLUMNS)),
                           descriptor(b + descriptor_low(C::Q + STAGE * C::Q_BYTES + (k / 4) * C::Q_PANEL + (k % 4) * SIXTEEN_COLUMNS)));
    wgmma_commit();
  }
  template <int STAGE> DEVICE void multiply_dp() {  // dP^T = V dO^T
    const u32 b = opaque(shared >> 4), a = b + wg * (HALF_PANEL / DESCRIPTOR_UNIT);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < D / 16; k++)
      wgmma_ss<Half, 0, 0>(k > 0, dp, descriptor(a + descriptor_low(C::V + (k / 4) * C::KV_PANEL + (k % 4) * SIXTEEN_COLUMNS)),
                           descriptor(b + descriptor_low(C::DO + STAGE * C::DO_BYTES + (k / 4) * C::Q_PANEL + (k % 4) * SIXTEEN_COLUMNS)));
    wgmma_commit();
  }
  template <int STAGE> DEVICE void multiply_dv() {  // dV += P^T dO
    const u32 b = opaque(shared >> 4);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Q_ROWS / 16; k++)
      wgmma_rs<Half, 1>(dv, probability + 4 * k,
                        descriptor(b + descriptor_low(C::DO + STAGE * C::DO_BYTES + k * SIXTEEN_ROWS, C::Q_PANEL)));
    wgmma_commit();
  }
  template <int STAGE> DEVICE void multiply_dk() {  // dK += dS^T Q
    const u32 b = opaque(shared >> 4);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Q_ROWS / 16; k++)
      wgmma_rs<Half, 1>(dk, ds + 4 * k, descriptor(b + descriptor_low(C::Q + STAGE * C::Q_BYTES + k * SIXTEEN_ROWS, C::Q_PANEL)));
    wgmma_commit();
  }
  template <int STAGE> DEVICE void multiply_dq() {  // dQ = dS K, or its transpose
    const u32 b = opaque(shared >> 4);
    const u32 at_ds = b + (C::DQ_TRANSPOSED ? wg * (Q_ROWS / 2 * PANEL_ROW / DESCRIPTOR_UNIT) : 0),
              at_k = b + (C::DQ_TRANSPOSED ? 0 : wg * (C::KV_PANEL / DESCRIPTOR_UNIT));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < KV_ROWS / 16; k++) {
      const u64 d_ds = descriptor(at_ds + descriptor_low(C::DS + STAGE * C::DS_BYTES + (k / 4) * C::Q_PANEL + (k % 4) * SIXTEEN_COLUMNS));
      const u64 d_k = descriptor(at_k + descriptor_low(C::K + k * SIXTEEN_ROWS));
      if constexpr (C::DQ_TRANSPOSED)
        wgmma_ss<Half, 1, 0>(k > 0, dq, d_k, d_ds);
      else
        wgmma_ss<Half, 0, 1>(k > 0, dq, d_ds, d_k);
    }
    wgmma_commit();
  }

  // ---- element-wise work (backward/elementwise.cuh)
  DEVICE float2 row_pair(int rows, int stage, int g) {
    return load_shared_f32x2(shared + rows + stage * C::ROW_BYTES + (lane & 3) * 8 + g * 32);
  }

  DEVICE Bits bits_of(int note) { return {p.mask, note, opaque(wg * WARPGROUP + warp * WARP + lane)}; }
  DEVICE void mask_partial(int rows, const Pipeline& pipe) {
    const StepNote note{rows};
    if (!note.partial()) return;
    const int keys = notes.keys(pipe), from = notes.template mask_from<MASK>(pipe);
    const int local = wg * 64 + warp * 16 + (lane >> 2);
    const KeyMask<MASK> low(local, keys, from), high(local + 8, keys, from);
    const int query = note.q_row() + 2 * (lane & 3);
    mask_scores(s, p.mask, low, high, query, p.masked_score);
  }
  template <int STAGE> DEVICE void exponentiate(const float2 (&early)[EARLY_LSE]) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      const float2 lse = g < EARLY_LSE ? early[g < EARLY_LSE ? g : 0] : row_pair(C::LSE, STAGE, g);
      exponentiate_group<Half, SOFTCAP>(s + 4 * g, lse, p.scale_log2, probability + 2 * g);
    }
  }
  template <int STAGE> DEVICE void exponentiate_modified(int rows, const Pipeline& pipe, const float2 (&early)[EARLY_LSE]) {
    const int4 note = load_shared_i32x4(shared + C::SHARED_BYTES + STAGE * MODIFIER_NOTE_BYTES);
    const int more = more_keys<MASK>(notes, pipe, p.mask);
    // Opaque, else all that follows from them would be kept in registers. With distances, that spills less.
    const int own = ALIBI ? lane : opaque(lane), key = wg * 64 + (ALIBI ? warp : opaque(warp)) * 16 + (own >> 2);
    const ElementModifiers<DROPOUT, ALIBI> change(note, *m, StepNote{rows}.q_row(), key, own, notes.keys(pipe), more);
#pragma unroll
    for (int k = 0; k < GROUPS / 2; k++) {
      float2 lse[2];
#pragma unroll
      for (int g = 0; g < 2; g++)
        lse[g] = 2 * k + g < EARLY_LSE ? early[2 * k + g < EARLY_LSE ? 2 * k + g : 0] : row_pair(C::LSE, STAGE, 2 * k + g);
      float x[8];
      exponentiate_sixteen<SOFTCAP>(change, k, s + 8 * k, lse, p.scale_log2, x);
#pragma unroll
      for (int i = 0; i < 4; i++) probability[4 * k + i] = pack_kept<Half, DROPOUT>(x[2 * i], x[2 * i + 1]);
    }
  }
  template <int STAGE> DEVICE void differentiate(const float2 (&early)[EARLY_DELTA]) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      const float2 delta = g < EARLY_DELTA ? early[g < EARLY_DELTA ? g : 0] : row_pair(C::DELTA, STAGE, g);
      if constexpr (DROPOUT)
        differentiate_dropped<Half>(s + 4 * g, dp + 4 * g, delta, m->rescale, ds + 2 * g);
      else
        differentiate_group<Half>(s + 4 * g, dp + 4 * g, delta, ds + 2 * g);
    }
  }

  // ---- what leaves the registers
  template <int STAGE> DEVICE void put_ds(u32 phase) {  // [query][key], one panel of 64 keys per warpgroup
    bars.ds_empty(STAGE).wait(phase ^ 1);
    const int chunk = (2 * warp + ((lane >> 3) & 1)) ^ (lane & 7);
    const u32 at = shared + C::DS + STAGE * C::DS_BYTES + wg * C::Q_PANEL + ((lane >> 4) * 8 + (lane & 7)) * PANEL_ROW + chunk * 16;
#pragma unroll
    for (int k = 0; k < Q_ROWS / 16; k++)
      stmatrix_transposed(at + k * SIXTEEN_ROWS, ds[4 * k], ds[4 * k + 1], ds[4 * k + 2], ds[4 * k + 3]);
  }
  template <int STAGE> DEVICE void put_dq(u32 phase) {  // fragment order: the postprocess kernel unscrambles
    bars.dq_empty(STAGE).wait(phase ^ 1);
    const u32 at = shared + C::DQ + STAGE * C::DQ_BYTES + wg * (C::DQ_BYTES / 2) + (warp * 32 + lane) * 16;
#pragma unroll
    for (int i = 0; i < C::DQ_REGISTERS / 4; i++)
      store_shared_f32x4(at + i * (WARPGROUP * 16), dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
  }
  // A piece of a chain's dV and dK, as they are in registers, through the dQ buffer of step j.
  template <int PIECE> DEVICE void put_sum(int j, const Pipeline& pipe) {
    const u32 stage = j & 1, phase = ((u32)(j >> 1) + (stage ? pipe.flips[1] : pipe.flips[0])) & 1;
    bars.dq_empty(stage).wait(phase ^ 1);
    const u32 at = shared + C::DQ + stage * C::DQ_BYTES + wg * (C::SUM_FLOATS * 2) + (warp * 32 + lane) * 16;
#pragma unroll
    for (int i = 0; i < C::SUM_REGISTERS / 4; i++) {
      const int first = PIECE * C::SUM_REGISTERS + 4 * i;
      const float* r = first < D / 2 ? dv + first : dk + first - D / 2;
      if constexpr (DROPOUT) {
        const float factor = first < D / 2 ? m->rescale : 1.f;
        store_shared_f32x4(at + i * (WARPGROUP * 16), r[0] * factor, r[1] * factor, r[2] * factor, r[3] * factor);
      } else {
        store_shared_f32x4(at + i * (WARPGROUP * 16), r[0], r[1], r[2], r[3]);
      }
    }
    publish(bars.dq_full(stage));
  }
  // dV and dK as put_sum left them.
  DEVICE void take_state(const float* states, const Pipeline& pipe) {
    const i64 piece = notes.first_sum(pipe) - p.first_sum;
    const float4* from = (const float4*)(states + piece * C::SUM_FLOATS) + state_quad<C>(wg, 0) + warp * 32 + lane;
#pragma unroll
    for (int first = 0; first < D; first += 4) {
      const float4 v = __ldcg(from + state_quad<C>(0, first));
      float* r = first < D / 2 ? dv + first : dk + first - D / 2;
      r[0] = v.x, r[1] = v.y, r[2] = v.z, r[3] = v.w;
    }
  }
  // dK and dV leave through the dS buffers: nobody may write there before the last store has read them, and no store
  // before both warpgroups are done with dS.
  DEVICE void await_stored() {
    if (warp == 0 && lane == 0) bulk_wait_read();
    named_barrier_sync<BOTH>(2 * WARPGROUP);
  }
  // A finished 64 x D half of dK or dV, through this warpgroup's part of the dS buffers.
  DEVICE void store_tile(float (&tile)[D / 2], float factor, const TensorMap* map, const ChainNote& chain) {
    await_stored();
#pragma unroll
    for (int g = 0; g < D / 16; g++) {
      u32 r[4];
#pragma unroll
      for (int i = 0; i < 4; i++) r[i] = pack<Half>(tile[8 * g + 2 * i] * factor, tile[8 * g + 2 * i + 1] * factor);
      const int row = warp * 16 + (lane & 15), chunk = (2 * (g % 4) + (lane >> 4)) ^ (lane & 7);
      stmatrix(shared + C::OUT + wg * (C::OUT_BYTES / 2) + (g / 4) * HALF_PANEL + row * PANEL_ROW + chunk * 16, r[0], r[1], r[2], r[3]);
    }
    fence_async_shared();
    wg == 0 ? named_barrier_sync<FIRST_HALF>(WARPGROUP) : named_barrier_sync<SECOND_HALF>(WARPGROUP);
    if (warp == 0 && lane == 0) {
      for (int i = 0; i < C::PANELS; i++)
        tma_store<MASK == MaskKind::Packed>(map, shared + C::OUT + wg * (C::OUT_BYTES / 2) + i * HALF_PANEL, i * 64, chain.kv_head,
                                            chain.kv_row + wg * 64, chain.kv_plane);
      bulk_commit();
    }
  }
};
