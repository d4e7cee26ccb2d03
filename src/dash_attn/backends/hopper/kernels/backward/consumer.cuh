// Two warpgroups, 64 KV rows each: the five products of a task. P^T and dS^T stay in registers as the A operand of
// dV += P^T dO and dK += dS^T Q; dS goes through shared memory for dQ = dS K, delayed by one step so that no warpgroup
// waits for the other's half of dS.
#pragma once
#include "backward/consumer_base.cuh"

template <typename V> struct Consumer : ConsumerBase<V, Consumer<V>> {
  using Base = ConsumerBase<V, Consumer<V>>;
  using C = typename V::C;
  using Half = typename V::Half;
  using Base::arrive, Base::bars, Base::more, Base::notes, Base::p, Base::publish, Base::row_pair, Base::shared;
  using Base::MASK, Base::SOFTCAP, Base::LEGS, Base::DROPOUT, Base::ALIBI;
  using Bits = OwnBits<MASK, C::SCORE_REGISTERS, 2 * WARPGROUP>;
  static constexpr int D = V::D, Q_ROWS = C::Q_ROWS, SCORES = C::SCORE_REGISTERS, PAIRS = SCORES / 2, GROUPS = SCORES / 4;
  static constexpr bool EARLY_BITS = MASK == MaskKind::Bits && !SOFTCAP;  // while S is computed, likewise
  static constexpr bool READS_NOTE_EARLY = (Q_ROWS == 64 || is_band(MASK) || EARLY_BITS) && !DROPOUT;  // while S is computed; a register
  // Groups of LSE and delta loaded while the product before them still runs; more would spill.
  static constexpr bool FEWER = SOFTCAP || DROPOUT;
  static constexpr bool DP_LATE = DROPOUT && Q_ROWS == 128;  // behind the element-wise work of S, which needs the registers
  static constexpr int EARLY_LSE = Q_ROWS == 64 ? (FEWER ? (MASK == MaskKind::Bits ? 2 : 4) : GROUPS) : FEWER ? 1 : is_band(MASK) ? 6 : 2;
  static constexpr int EARLY_DELTA = Q_ROWS == 64 && !FEWER ? 4 : 1;

  int wg, warp, lane;  // warp inside the warpgroup
  float dk[D / 2], dv[D / 2];
  float s[SCORES], dp[SCORES], dq[C::DQ_REGISTERS];
  u32 probability[PAIRS], ds[PAIRS];

  DEVICE Consumer(const Role<V>& role, int warp_of_block, int lane_of_warp)
      : Base(role), wg(warp_of_block / 4 - 1), warp(warp_of_block & 3), lane(lane_of_warp) {}
  DEVICE int own_lane() const { return lane; }
  DEVICE bool elects() const { return warp == 0 && lane == 0; }
  DEVICE u32 out() const { return shared + C::OUT + wg * (C::OUT_BYTES / 2); }

  DEVICE void run(const BackwardMaps& maps) {
    Pipeline pipe;
    u32 kv_loads = 0;
    while (true) {
      notes.await_chain(pipe);
      const int steps = notes.chain(pipe).steps;
      if (steps < 0) break;
#pragma unroll
      for (int i = 0; i < D / 2; i++) dk[i] = dv[i] = 0.f;
      if constexpr (LEGS)
        if (more->states != nullptr) take_state(more->states, pipe);
      if (steps > 0) {
        walk_chain(steps, pipe, kv_loads & 1);
        arrive(bars.kv_empty());
        kv_loads++;
      }
      if (!LEGS && p.sums == nullptr) {
        store_tile(dv, this->dv_factor(), maps.dv, notes.chain(pipe));
        store_tile(dk, p.scale, maps.dk, notes.chain(pipe));
      } else {
        put_sum<0>(steps, pipe);
        put_sum<1>(steps + 1, pipe);
        put_sum<2>(steps + 2, pipe);
        put_sum<3>(steps + 3, pipe);
      }
      arrive(bars.chain_empty(pipe.chain_slot()));
      pipe.finish_chain(steps, sum_pieces<C>(p));
    }
    if (elects()) bulk_wait();
  }

 private:
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
    if constexpr (READS_NOTE_EARLY) rows = this->rows_of_step(pipe.steps + j);
    Bits bits;
    if constexpr (EARLY_BITS) bits = bits_of(rows);
    float2 lse[EARLY_LSE];
    this->load_early(lse, C::LSE + STAGE * C::ROW_BYTES);
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
    if constexpr (!READS_NOTE_EARLY) rows = this->rows_of_step(pipe.steps + j);
    if constexpr (SOFTCAP) cap_scores(s, p.cap_scale);
    if constexpr (MASK == MaskKind::Bits)
      (EARLY_BITS ? bits : bits_of(rows)).apply(s, p.masked_score);
    else
      mask_partial(rows, pipe);
    if constexpr (Base::MODIFIED)
      exponentiate_modified<STAGE>(rows, pipe, lse);
    else
      exponentiate<STAGE>(lse);
    if constexpr (DP_LATE) {
      bars.do_full(STAGE).wait(phase);
      multiply_dp<STAGE>();
    }
    multiply_dv<STAGE>();
    float2 delta[EARLY_DELTA];
    this->load_early(delta, C::DELTA + STAGE * C::ROW_BYTES);
    wgmma_wait<DP_LATE ? 0 : 1>();  // dP
    pin(dp);
    differentiate<STAGE>(delta);
    if constexpr (FIRST) this->await_stored();
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
  static constexpr int Q_AT(int stage) { return C::Q + stage * C::Q_BYTES; }
  static constexpr int DO_AT(int stage) { return C::DO + stage * C::DO_BYTES; }
  template <int STAGE> DEVICE void multiply_s() {  // S^T = K Q^T
    const u32 b = opaque(shared >> 4), a = b + wg * (HALF_PANEL / DESCRIPTOR_UNIT);
    multiply<Half, D>(s, RowsOf{a, C::K, C::KV_PANEL}, RowsOf{b, Q_AT(STAGE), C::Q_PANEL});
  }
  template <int STAGE> DEVICE void multiply_dp() {  // dP^T = V dO^T
    const u32 b = opaque(shared >> 4), a = b + wg * (HALF_PANEL / DESCRIPTOR_UNIT);
    multiply<Half, D>(dp, RowsOf{a, C::V, C::KV_PANEL}, RowsOf{b, DO_AT(STAGE), C::Q_PANEL});
  }
  template <int STAGE> DEVICE void multiply_dv() {  // dV += P^T dO
    multiply_add<Half>(dv, probability, ColumnsOf{opaque(shared >> 4), DO_AT(STAGE), C::Q_PANEL});
  }
  template <int STAGE> DEVICE void multiply_dk() {  // dK += dS^T Q
    multiply_add<Half>(dk, ds, ColumnsOf{opaque(shared >> 4), Q_AT(STAGE), C::Q_PANEL});
  }
  template <int STAGE> DEVICE void multiply_dq() {  // dQ = dS K, or its transpose
    const u32 base = opaque(shared >> 4);
    constexpr int DS = C::DS + STAGE * C::DS_BYTES;
    if constexpr (C::DQ_TRANSPOSED)
      multiply<Half, C::KV_ROWS>(dq, ColumnsOf{base, C::K}, RowsOf{base + wg * (Q_ROWS / 2 * PANEL_ROW / DESCRIPTOR_UNIT), DS, C::Q_PANEL});
    else
      multiply<Half, C::KV_ROWS>(dq, RowsOf{base, DS, C::Q_PANEL}, ColumnsOf{base + wg * (C::KV_PANEL / DESCRIPTOR_UNIT), C::K});
  }

  // ---- element-wise work (backward/elementwise.cuh)
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
    for (int g = 0; g < GROUPS; g++)
      exponentiate_group<Half, SOFTCAP>(s + 4 * g, row_pair(early, C::LSE + STAGE * C::ROW_BYTES, g), p.scale_log2, probability + 2 * g);
  }
  template <int STAGE> DEVICE void exponentiate_modified(int rows, const Pipeline& pipe, const float2 (&early)[EARLY_LSE]) {
    const int4 note = load_shared_i32x4(shared + C::SHARED_BYTES + STAGE * MODIFIER_NOTE_BYTES);
    const int more_than_queries = more_keys<MASK>(notes, pipe, p.mask);
    // Opaque, else all that follows from them would be kept in registers. With distances, that spills less.
    const int own = ALIBI ? lane : opaque(lane), key = wg * 64 + (ALIBI ? warp : opaque(warp)) * 16 + (own >> 2);
    const ElementModifiers<DROPOUT, ALIBI> change(note, *more, StepNote{rows}.q_row(), key, own, notes.keys(pipe), more_than_queries);
#pragma unroll
    for (int k = 0; k < GROUPS / 2; k++) {
      constexpr int LSE = C::LSE + STAGE * C::ROW_BYTES;
      const float2 lse[2] = {row_pair(early, LSE, 2 * k), row_pair(early, LSE, 2 * k + 1)};
      exponentiate_sixteen<Half, SOFTCAP>(change, k, s + 8 * k, lse, p.scale_log2, probability + 4 * k);
    }
  }
  template <int STAGE> DEVICE void differentiate(const float2 (&early)[EARLY_DELTA]) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      const float2 delta = row_pair(early, C::DELTA + STAGE * C::ROW_BYTES, g);
      if constexpr (DROPOUT)
        differentiate_dropped<Half>(s + 4 * g, dp + 4 * g, delta, more->rescale, ds + 2 * g);
      else
        differentiate_group<Half>(s + 4 * g, dp + 4 * g, delta, ds + 2 * g);
    }
  }

  // ---- what leaves the registers, and comes back
  template <int STAGE> DEVICE void put_ds(u32 phase) {  // [query][key], one panel of 64 keys per warpgroup
    bars.ds_empty(STAGE).wait(phase ^ 1);
    const int chunk = (2 * warp + ((lane >> 3) & 1)) ^ (lane & 7);
    const u32 at = shared + C::DS + STAGE * C::DS_BYTES + wg * C::Q_PANEL + ((lane >> 4) * 8 + (lane & 7)) * PANEL_ROW + chunk * 16;
#pragma unroll
    for (int k = 0; k < Q_ROWS / 16; k++) stmatrix_transposed(at + k * SIXTEEN_ROWS, ds + 4 * k);
  }
  template <int STAGE> DEVICE void put_dq(u32 phase) {
    bars.dq_empty(STAGE).wait(phase ^ 1);
    this->put_fragments(dq, shared + C::DQ + STAGE * C::DQ_BYTES + wg * (C::DQ_BYTES / 2) + (warp * 32 + lane) * 16);
  }
  // A piece of a chain's dV and dK, as they are in registers, through the dQ buffer of step j.
  template <int PIECE> DEVICE void put_sum(int j, const Pipeline& pipe) {
    const u32 stage = j & 1, phase = pipe.phase(j);
    bars.dq_empty(stage).wait(phase ^ 1);
    const u32 at = shared + C::DQ + stage * C::DQ_BYTES + wg * (C::SUM_FLOATS * 2) + (warp * 32 + lane) * 16;
    this->template put_piece<PIECE>(dv, dk, at, this->dv_factor());
    publish(bars.dq_full(stage));
  }
  // dV and dK as put_sum left them. Of legs, they begin as states and end as such.
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
  // A finished 64 x D half of dK or dV, through this warpgroup's part of the dS buffers.
  DEVICE void store_tile(float (&tile)[D / 2], float factor, const TensorMap* map, const ChainNote& chain) {
    this->await_stored();
#pragma unroll
    for (int g = 0; g < D / 16; g++) {
      u32 r[4];
#pragma unroll
      for (int i = 0; i < 4; i++) r[i] = pack<Half>(tile[8 * g + 2 * i] * factor, tile[8 * g + 2 * i + 1] * factor);
      const int row = warp * 16 + (lane & 15), chunk = (2 * (g % 4) + (lane >> 4)) ^ (lane & 7);
      stmatrix(shared + C::OUT + wg * (C::OUT_BYTES / 2) + (g / 4) * HALF_PANEL + row * PANEL_ROW + chunk * 16, r);
    }
    fence_async_shared();
    this->sync_warpgroup();
    if (elects()) this->template store_columns<0, D>(map, chain);
  }
};
