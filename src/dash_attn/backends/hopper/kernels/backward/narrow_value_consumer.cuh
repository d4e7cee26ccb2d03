// The consumers of heads whose keys are wide and whose values are not (TallConfig beyond D = 128). As Consumer, but the
// accumulators leave 56 registers: one tile of scores, or dQ, and some 16-bit pairs. So S becomes P in 16 bits before dP comes,
// and products follow each other; those of P and dS start as soon as a part of them is there.
#pragma once
#include "backward/consumer_base.cuh"

template <typename V> struct NarrowValueConsumer : ConsumerBase<V, NarrowValueConsumer<V>> {
  using Base = ConsumerBase<V, NarrowValueConsumer<V>>;
  using C = typename V::C;
  using Half = typename V::Half;
  using Base::arrive, Base::bars, Base::more, Base::notes, Base::p, Base::publish, Base::row_pair, Base::shared;
  using Base::MASK, Base::SOFTCAP, Base::LEGS, Base::DROPOUT;
  static constexpr int D = V::D, DV = V::DV, Q_ROWS = C::Q_ROWS, SCORES = C::SCORE_REGISTERS, PAIRS = SCORES / 2;
  using Bits = OwnBits<MASK, SCORES, 2 * WARPGROUP>;
  static constexpr bool EARLY_BITS = MASK == MaskKind::Bits && !SOFTCAP;  // loaded while S is computed; costs a register
  static constexpr int DEPTH = Q_ROWS / 16;  // of dV and dK, in matrix products
  // Groups of LSE and delta loaded while the product before them still runs. With softcap, fewer of delta would spill.
  static constexpr int EARLY_LSE = 4, EARLY_DELTA = SOFTCAP ? 8 : 2;
  // dS is made from P in float16, which rounds eight times finer than bfloat16; with softcap, from P times the slope of the cap;
  // with dropout, from P that may be negative.
  static constexpr bool HAS_WEIGHTS = SOFTCAP || DROPOUT || Half::is_bf16;
  // P is lifted by a power of two, so that small ones are no denormals of float16 either. Whoever takes it drops it again, exactly.
  static constexpr float LIFT = 12.f, DROP = C::DV_FACTOR;

  int wg;
  u32 thread;  // of the warpgroup; what follows from it is computed anew where it is needed, as registers are scarce
  int left;    // steps of the chain still to come
  float dk[D / 2], dv[DV / 2], s[SCORES];

  DEVICE NarrowValueConsumer(const Role<V>& role, int warp, int lane) : Base(role), wg(warp / 4 - 1), thread(warp % 4 * WARP + lane) {}
  DEVICE int own_lane() const { return thread % WARP; }
  DEVICE bool elects() const { return thread == 0; }
  DEVICE u32 out() const { return shared + C::OUT + wg * (C::OUT_BYTES / 2); }

  DEVICE void run(const BackwardMaps& maps) {
    Progress at;
    while (true) {
      notes.await_chain(at.chain());
      left = notes.chain(at.chain()).steps;
      if (left < 0) break;
      clear(dk);
      clear(dv);
      if constexpr (LEGS)
        if (more->states != nullptr) take_state(more->states, at);
      if (left > 0) {
        walk_chain(at);
        arrive(bars.kv_empty());
        at.bits ^= Progress::KV;
      }
      if (!LEGS && p.sums == nullptr) {
        store_tile<0, DV>(dv, this->dv_factor(), maps.dv, notes.chain(at.chain()));
        store_tile<0, 128>(dk, p.scale, maps.dk, notes.chain(at.chain()));
        store_tile<128, D>(dk, p.scale, maps.dk, notes.chain(at.chain()));
      } else {
        put_sums(at);
      }
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
    DEVICE u32 kv_phase() const { return bits / KV % 2; }
    template <int STAGE> DEVICE u32 phase() const { return bits >> STAGE & 1; }
    template <int STAGE> DEVICE void finish_step() { bits = (bits ^ (1 << STAGE)) + STEP; }
    DEVICE void finish_chain() { bits = (bits & ~CHAINS) | ((bits + CHAIN) & CHAINS); }
  };
  // For matrix descriptors. Were it the same for all steps, the assembler would keep every descriptor in a register of its own.
  DEVICE u32 base() const { return (shared >> 4) + (opaque(left) >> 31); }

  template <int N> DEVICE void clear(float (&tile)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) tile[i] = 0.f;
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
      finish_dq<1>(at);
    } else {
      finish_dq<0>(at);
    }
  }

  // One Q tile. STAGE is its parity. No product runs on into the next step: while this warpgroup waits, the other one's products run.
  template <int STAGE, bool FIRST> DEVICE void step(Progress& at) {
    constexpr int OTHER = STAGE ^ 1;
    bars.q_full(STAGE).wait(at.template phase<STAGE>());
    multiply_s<STAGE>();
    const int rows = this->rows_of_step(at.number());
    Bits bits;
    if constexpr (EARLY_BITS) bits = bits_of(rows);
    float2 lse[EARLY_LSE];
    this->load_early(lse, C::LSE + STAGE * C::ROW_BYTES);
    wgmma_wait<0>();  // S
    pin(s);
    if constexpr (SOFTCAP) cap_scores(s, p.cap_scale);
    if constexpr (MASK == MaskKind::Bits)
      (EARLY_BITS ? bits : bits_of(rows)).apply(s, p.masked_score);
    else
      mask_partial(rows, at);
    u32 probability[PAIRS], weights[PAIRS];
    bars.do_full(0).wait(at.number() & 1);
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {  // dV += P^T dO: sixteen queries as soon as their P is there
      if constexpr (Base::MODIFIED)
        exponentiate_modified<STAGE>(k, rows, at, lse, probability, weights);
      else
        exponentiate<STAGE>(k, lse, probability, weights);
      multiply_rows(dv, probability, C::DO, k);
    }
    wgmma_commit();
    if constexpr (FIRST) bars.v_full().wait(at.kv_phase());
    if constexpr (HAS_WEIGHTS) wgmma_wait<0>();  // there is no room for P, weights and dP
    float dp[SCORES];
    multiply_dp(dp);
    float2 delta[EARLY_DELTA];
    this->load_early(delta, C::DELTA);
    wgmma_wait<0>();
    pin(dp);
    u32 ds[PAIRS];
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {  // dK += dS^T Q
      differentiate(k, delta, HAS_WEIGHTS ? weights : probability, dp, ds);
      multiply_rows(dk, ds, C::Q + STAGE * C::Q_BYTES, k);
    }
    wgmma_commit();
    arrive(bars.do_empty(0));
    if constexpr (FIRST) this->await_stored();
    put_ds<STAGE>(ds, at.template phase<STAGE>());
    publish(bars.ds_full(STAGE));
    wgmma_wait<0>();  // dK
    arrive(bars.q_empty(STAGE));
    if constexpr (FIRST)
      bars.dq_empty(STAGE).wait(at.template phase<STAGE>() ^ 1);  // the chain before may have ended in either stage
    else
      finish_dq<OTHER>(at);  // of the step before
    at.template finish_step<STAGE>();
    left--;
  }

  // dQ of the last step of this parity. There is one staging buffer: dQ of the step before must have left it.
  template <int STAGE> DEVICE void finish_dq(const Progress& at) {
    bars.ds_full(STAGE).wait(at.template phase<STAGE>() ^ 1);
    float dq[C::DQ_REGISTERS];
    multiply_dq<STAGE>(dq);
    bars.dq_empty(STAGE ^ 1).wait(at.template phase<STAGE ^ 1>() ^ 1);
    wgmma_wait<0>();
    pin(dq);
    arrive(bars.ds_empty(STAGE));
    this->put_fragments(dq, staging(C::DQ_BYTES / 2));
    publish(bars.dq_full(STAGE));
  }

  // ---- products
  // Keys with their panels where they lie.
  struct KeyRows {
    static constexpr int TRANSPOSED = 0;
    u32 base;
    DEVICE u64 operator[](int k) const {
      return descriptor(base + descriptor_low(C::K + C::k_panel(k / 4) * C::KV_PANEL + (k % 4) * SIXTEEN_COLUMNS));
    }
  };
  template <int STAGE> DEVICE void multiply_s() {  // S^T = K Q^T
    const u32 b = base(), a = b + wg * (HALF_PANEL / DESCRIPTOR_UNIT);
    multiply<Half, D>(s, KeyRows{a}, RowsOf{b, C::Q + STAGE * C::Q_BYTES, C::Q_PANEL});
  }
  DEVICE void multiply_dp(float (&dp)[SCORES]) {  // dP^T = V dO^T
    const u32 b = base(), a = b + wg * (HALF_PANEL / DESCRIPTOR_UNIT);
    multiply<Half, DV>(dp, RowsOf{a, C::V, C::KV_PANEL}, RowsOf{b, C::DO, C::Q_PANEL});
  }
  // Sixteen queries of dV or dK; a commit ends the product.
  template <int N> DEVICE void multiply_rows(float (&d)[N], const u32 (&a)[PAIRS], int rows, int k) {
    wgmma_fence();
    wgmma_rs<Half, 1>(d, a + 4 * k, ColumnsOf{base(), rows, C::Q_PANEL}[k]);
  }
  // dQ = dS K, in a whole panel of columns and half of the middle one, which lies two panels behind the first and one behind the last.
  template <int STAGE> DEVICE void multiply_dq(float (&dq)[C::DQ_REGISTERS]) {
    constexpr u32 NEARER = descriptor_low(0, C::KV_PANEL - 64);
    const u32 a = base(), b = a + wg * (C::KV_PANEL / DESCRIPTOR_UNIT - NEARER);
    multiply<Half, C::KV_ROWS>(dq, RowsOf{a, C::DS + STAGE * C::DS_BYTES, C::Q_PANEL}, ColumnsOf{b, C::K, 2 * C::KV_PANEL});
  }

  // ---- element-wise work
  DEVICE Bits bits_of(int note) { return {p.mask, note, wg * WARPGROUP + opaque(thread)}; }
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
  // Of sixteen queries: two groups of registers.
  template <int STAGE> DEVICE void exponentiate(int k, const float2 (&early)[EARLY_LSE], u32 (&probability)[PAIRS], u32 (&weights)[PAIRS]) {
#pragma unroll
    for (int g = 2 * k; g < 2 * k + 2; g++) {
      const float2 lse = row_pair(early, C::LSE + STAGE * C::ROW_BYTES, g);
      const float2 lift = make_float2(LIFT - lse.x, LIFT - lse.y);
#pragma unroll
      for (int i = 2 * g; i < 2 * g + 2; i++) {
        const float low = s[2 * i], high = s[2 * i + 1];
        const float x = exp2_approx(fmaf(low, p.scale_log2, lift.x)), y = exp2_approx(fmaf(high, p.scale_log2, lift.y));
        probability[i] = pack<Half>(x, y);
        if constexpr (SOFTCAP)
          weights[i] = pack<f16>(x * fmaf(-low, low, 1.f), y * fmaf(-high, high, 1.f));
        else if constexpr (HAS_WEIGHTS)
          weights[i] = pack<f16>(x, y);
      }
    }
  }
  template <int STAGE> DEVICE void exponentiate_modified(int k, int rows, const Progress& at, const float2 (&early)[EARLY_LSE],
                                                         u32 (&probability)[PAIRS], u32 (&weights)[PAIRS]) {
    const int4 note = load_shared_i32x4(shared + C::SHARED_BYTES + STAGE * MODIFIER_NOTE_BYTES);
    const int more_than_queries = more_keys<MASK>(notes, at.chain(), p.mask);
    const u32 own = opaque(thread), lane = own % WARP, warp = own / WARP;
    const int key = wg * 64 + warp * 16 + (lane >> 2);
    const ElementModifiers<DROPOUT, Base::ALIBI> change(note, *more, StepNote{rows}.q_row(), key, lane, notes.keys(at.chain()),
                                                        more_than_queries);
    float2 lift[2];
#pragma unroll
    for (int g = 2 * k; g < 2 * k + 2; g++) {
      const float2 lse = row_pair(early, C::LSE + STAGE * C::ROW_BYTES, g);
      lift[g - 2 * k] = make_float2(lse.x - LIFT, lse.y - LIFT);
    }
    exponentiate_sixteen<Half, SOFTCAP>(change, k, s + 8 * k, lift, p.scale_log2, probability + 4 * k);
    if constexpr (HAS_WEIGHTS)
#pragma unroll
      for (int i = 4 * k; i < 4 * k + 4; i++) weights[i] = pack<f16>(s[2 * i], s[2 * i + 1]);
  }
  // dS = P (dP - delta), likewise.
  DEVICE void differentiate(int k, const float2 (&early)[EARLY_DELTA], const u32 (&weights)[PAIRS], const float (&dp)[SCORES],
                            u32 (&ds)[PAIRS]) {
#pragma unroll
    for (int g = 2 * k; g < 2 * k + 2; g++) {
      const float2 delta = row_pair(early, C::DELTA, g);
      const float2 dropped = make_float2(-DROP * delta.x, -DROP * delta.y);  // not by dropout: the lift of P
#pragma unroll
      for (int i = 2 * g; i < 2 * g + 2; i++) {
        const float2 weight = unpack<f16>(weights[i]);
        if constexpr (DROPOUT) {
          const float rescale = DROP * more->rescale;
          ds[i] = pack<Half>(weight.x * dropped_difference(weight.x, dp[2 * i], rescale, -dropped.x),
                             weight.y * dropped_difference(weight.y, dp[2 * i + 1], rescale, -dropped.y));
          continue;
        }
        ds[i] = pack<Half>(weight.x * fmaf(dp[2 * i], DROP, dropped.x), weight.y * fmaf(dp[2 * i + 1], DROP, dropped.y));
      }
    }
  }

  // ---- what leaves the registers, and comes back
  template <int STAGE> DEVICE void put_ds(const u32 (&ds)[PAIRS], u32 phase) {  // [query][key], one panel of 64 keys per warpgroup
    bars.ds_empty(STAGE).wait(phase ^ 1);
    const u32 own = opaque(thread), lane = own % WARP, warp = own / WARP;
    const int chunk = (2 * warp + ((lane >> 3) & 1)) ^ (lane & 7);
    const u32 at = shared + C::DS + STAGE * C::DS_BYTES + wg * C::Q_PANEL + ((lane >> 4) * 8 + (lane & 7)) * PANEL_ROW + chunk * 16;
#pragma unroll
    for (int k = 0; k < Q_ROWS / 16; k++) stmatrix_transposed(at + k * SIXTEEN_ROWS, ds + 4 * k);
  }
  DEVICE u32 staging(int bytes_of_half) const { return shared + C::DQ + wg * bytes_of_half + opaque(thread) * 16; }
  // dV and dK, as they are in registers, through the dQ buffer: the steps behind those of the chain. What was there must have left it.
  DEVICE void put_sums(Progress& at) {
    const u32 first = notes.chain(at.chain()).steps & 1, phases[2] = {at.template phase<0>(), at.template phase<1>()};
    const u32 same = first ? phases[1] : phases[0], other = first ? phases[0] : phases[1];
    bars.dq_empty(first).wait(same ^ 1);  // of a chain without steps, the one before may have ended in either stage
    put_sum<0>(first, other ^ 1);
    put_sum<1>(first ^ 1, same);
    put_sum<2>(first, other);
    put_sum<3>(first ^ 1, same ^ 1);
    at.bits += C::SUM_PIECES * Progress::STEP;
  }
  template <int PIECE> DEVICE void put_sum(u32 stage, u32 phase_before) {
    bars.dq_empty(stage ^ 1).wait(phase_before);
    this->template put_piece<PIECE>(dv, dk, staging(C::SUM_FLOATS * 2), LEGS ? 1.f : this->dv_factor());  // of a state, the ending drops it
    publish(bars.dq_full(stage));
  }
  // dV and dK as put_sum left them. Of legs, they begin as states and end as such.
  DEVICE void take_state(const float* states, const Progress& at) {
    const i64 piece = notes.first_sum(at.chain()) - p.first_sum;
    const float4* from = (const float4*)(states + piece * C::SUM_FLOATS) + state_quad<C>(wg, 0) + opaque(thread);
#pragma unroll
    for (int first = 0; first < (D + DV) / 2; first += 4) {
      const float4 v = __ldcg(from + state_quad<C>(0, first));
      float* r = first < DV / 2 ? dv + first : dk + first - DV / 2;
      r[0] = v.x, r[1] = v.y, r[2] = v.z, r[3] = v.w;
    }
  }
  // Some columns of a finished half of dK or dV, through this warpgroup's part of the dS buffers.
  template <int COLUMN, int END, int N>
  DEVICE void store_tile(float (&tile)[N], float factor, const TensorMap* map, const ChainNote& chain) {
    this->await_stored();
    const u32 own = opaque(thread), lane = own % WARP, warp = own / WARP;
#pragma unroll
    for (int g = 0; g < (END - COLUMN) / 16; g++) {
      const float* x = tile + COLUMN / 2 + 8 * g;
      u32 r[4];
#pragma unroll
      for (int i = 0; i < 4; i++) r[i] = pack<Half>(x[2 * i] * factor, x[2 * i + 1] * factor);
      const int row = warp * 16 + (lane & 15), chunk = (2 * (g % 4) + (lane >> 4)) ^ (lane & 7);
      stmatrix(shared + C::OUT + wg * (C::OUT_BYTES / 2) + (g / 4) * HALF_PANEL + row * PANEL_ROW + chunk * 16, r);
    }
    fence_async_shared();
    this->sync_warpgroup();
    if (elects()) this->template store_columns<COLUMN, END>(map, chain);
  }
};
