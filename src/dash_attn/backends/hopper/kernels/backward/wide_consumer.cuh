// The consumers of wide heads (WideConfig). The first warpgroup (VALUES) computes S and P and sums dV = P^T dO; the second computes
// dP and dS and sums dK = dS^T Q. P goes to the second in fp32: both have the same fragments, so every thread reads what its
// counterpart wrote. dS goes through shared memory for dQ = dS K, of which each warpgroup computes half of the columns one step
// late, in two pieces: behind its element-wise work and behind its sum. They meet at no barrier: each waits only for the tile it needs
// next.
#pragma once
#include "backward/consumer_base.cuh"

template <typename V, bool VALUES> struct WideConsumer : ConsumerBase<V, WideConsumer<V, VALUES>> {
  using Base = ConsumerBase<V, WideConsumer<V, VALUES>>;
  using C = typename V::C;
  using Half = typename V::Half;
  using Base::arrive, Base::bars, Base::more, Base::notes, Base::p, Base::publish, Base::row_pair, Base::shared;
  using Base::MASK, Base::SOFTCAP, Base::DROPOUT;
  static constexpr int wg = VALUES ? 0 : 1;
  static constexpr int D = V::D, SCORES = 32, SUM = D / 2, OWN = 32, INNER = C::INNER / 2;  // registers
  static constexpr int OUT = VALUES ? C::P : C::DS;
  static constexpr bool DQ_LATE = VALUES && SOFTCAP && D == 256;  // behind the element-wise work, which needs the registers
  using Bits = OwnBits<MASK, SCORES, WARPGROUP>;

  int warp, lane;  // warp inside the warpgroup
  Pipeline pipe;
  float sum[SUM], scores[SCORES];  // dV and S, or dK and dP
  Bits bits;                       // of the scores that come next

  DEVICE WideConsumer(const Role<V>& role, int warp_of_block, int lane_of_warp) : Base(role), warp(warp_of_block & 3), lane(lane_of_warp) {}
  DEVICE int own_lane() const { return lane; }
  DEVICE bool elects() const { return warp == 0 && lane == 0; }
  DEVICE u32 out() const { return shared + OUT; }

  DEVICE void run(const TensorMap* map) {
    u32 kv_loads = 0;
    while (true) {
      notes.await_chain(pipe);
      const int steps = notes.chain(pipe).steps;
      if (steps < 0) break;
#pragma unroll
      for (int i = 0; i < SUM; i++) sum[i] = 0.f;
      if constexpr (V::LEGS)
        if (more->states != nullptr) take_state(more->states);
      if (steps > 0) walk_chain(steps, kv_loads++ & 1);
      if (!V::LEGS && p.sums == nullptr) {
        store_panels<0>(map);
        store_panels<C::OUT_PANELS>(map);
      } else {
        put_sum<0>(steps);
        put_sum<1>(steps + 1);
      }
      arrive(bars.chain_empty(pipe.chain_slot()));
      pipe.finish_chain(steps, sum_pieces<C>(p));
    }
    if (elects()) bulk_wait();
  }

 private:
  DEVICE void walk_chain(int steps, u32 kv_phase) {
    bars.k_full().wait(kv_phase);
    if constexpr (!VALUES) bars.v_full().wait(kv_phase);
    multiply_scores(0);
    wgmma_wait<0>();
    pin(scores);
    this->await_stored();
    const int last = steps - 1;
    if (last == 0) {
      step<false, false>(0);
    } else {
      step<false, true>(0);
#pragma unroll 1
      for (int j = 1; j < last; j++) step<true, true>(j);
      step<true, false>(last);
    }
    finish(last);
  }

  // One Q tile, whose scores are there. BEFORE: dQ of the step before; NEXT: scores of the next. No product is left running: the
  // loop's back edge would make ptxas serialise them.
  template <bool BEFORE, bool NEXT> DEVICE void step(int j) {
    float own[OWN], inner[INNER];
    u32 packed[SCORES / 2];
    if constexpr (BEFORE && !DQ_LATE) multiply_own(own, j - 1);
    if constexpr (VALUES)
      exponentiate(j, packed);
    else
      differentiate(j, packed);
    if constexpr (BEFORE) {
      if constexpr (DQ_LATE) multiply_own(own, j - 1);
      wgmma_wait<0>();
      put_own(own);
    }
    await_summand(j);
    multiply_sum(j, packed);
    if constexpr (BEFORE) multiply_dq(inner, j - 1, C::inner_column(wg));
    if constexpr (!VALUES || BEFORE) fence_async_shared();  // behind the products: it waits until what was stored has landed
    if constexpr (!VALUES) arrive(bars.ds_full(stage(j)));
    if constexpr (BEFORE) arrive(bars.dq_full(stage(j - 1), wg));
    if constexpr (NEXT) multiply_scores(j + 1);
    wgmma_wait<BEFORE + NEXT>();  // dV or dK
    arrive(VALUES ? bars.do_empty(do_stage(j)) : bars.q_empty(stage(j)));
    if constexpr (BEFORE) {
      wgmma_wait<NEXT>();
      put_inner(inner, j - 1);
    }
    wgmma_wait<0>();
    pin(scores);
    pin(sum);
  }

  // dQ of the last step.
  DEVICE void finish(int j) {
    float own[OWN], inner[INNER];
    multiply_own(own, j);
    multiply_dq(inner, j, C::inner_column(wg));
    wgmma_wait<0>();
    arrive(bars.kv_empty());
    put_own(own);
    publish(bars.dq_full(stage(j), wg));
    put_inner(inner, j);
    if constexpr (VALUES)  // the other warpgroup is through with the buffer in which the sum leaves
      await_p_read(pipe.steps + j + 1);
    else
      bars.ds_empty(stage(j)).wait(phase(j));
  }

  // ---- where step j is
  static DEVICE u32 stage(int j) { return j & 1; }
  DEVICE u32 phase(int j) const { return pipe.phase(j); }
  static DEVICE u32 do_stage(int j) { return C::DO_STAGES == 2 ? stage(j) : 0; }
  DEVICE void await_grad_out(int j) { bars.do_full(do_stage(j)).wait(C::DO_STAGES == 2 ? phase(j) : (pipe.steps + j) & 1); }
  DEVICE void await_summand(int j) {  // dO or Q
    if constexpr (VALUES)
      await_grad_out(j);
    else
      bars.q_full(stage(j)).wait(phase(j));
  }
  DEVICE void await_p_read(u32 number) { bars.p_empty().wait((number & 1) ^ 1); }  // the P before that one

  // ---- products
  DEVICE void multiply_scores(int j) {  // S^T = K Q^T or dP^T = V dO^T
    if constexpr (VALUES)
      bars.q_full(stage(j)).wait(phase(j));
    else
      await_grad_out(j);
    if constexpr (VALUES && MASK == MaskKind::Bits) bits = {p.mask, this->rows_of_step(pipe.steps + j), opaque(warp * WARP + lane)};
    const u32 a = opaque(shared >> 4), b = a + (VALUES ? stage(j) : do_stage(j)) * (C::Q_BYTES / DESCRIPTOR_UNIT);
    multiply<Half, D>(scores, RowsOf{a, VALUES ? C::K : C::V, C::KV_PANEL}, RowsOf{b, VALUES ? C::Q : C::DO, C::Q_PANEL});
  }
  DEVICE void multiply_sum(int j, const u32 (&packed)[SCORES / 2]) {  // dV += P^T dO or dK += dS^T Q
    const u32 b = opaque(shared >> 4) + (VALUES ? do_stage(j) : stage(j)) * (C::Q_BYTES / DESCRIPTOR_UNIT);
    multiply_add<Half>(sum, packed, ColumnsOf{b, VALUES ? C::DO : C::Q, C::Q_PANEL});
  }
  DEVICE void multiply_own(float (&own)[OWN], int j) {
    bars.ds_full(stage(j)).wait(phase(j));
    multiply_dq(own, j, C::own_column(wg));
  }
  template <int N> DEVICE void multiply_dq(float (&d)[N], int j, int column) {  // dQ = dS K, 2 N columns of it
    const u32 b = opaque(shared >> 4), a = b + stage(j) * (C::DS_BYTES / DESCRIPTOR_UNIT);
    const u32 k_at = b + (column / 64) * (C::KV_PANEL / DESCRIPTOR_UNIT) + (column % 64) * 2 / DESCRIPTOR_UNIT;
    multiply<Half, C::KV_ROWS>(d, RowsOf{a, C::DS, C::Q_PANEL}, ColumnsOf{k_at, C::K});
  }

  // ---- element-wise work (backward/elementwise.cuh)
  DEVICE u32 my_float4(int at) const { return shared + at + (warp * 32 + lane) * 16; }  // of a tile in fragment order
  DEVICE float4 probability(int g) const { return load_shared_f32x4(my_float4(C::P) + g * (WARPGROUP * 16)); }

  // P, packed, and in fp32 for the other warpgroup.
  DEVICE void exponentiate(int j, u32 (&packed)[SCORES / 2]) {
    if constexpr (SOFTCAP) cap_scores(scores, p.cap_scale);
    if constexpr (MASK == MaskKind::Bits)
      bits.apply(scores, p.masked_score);
    else
      mask_partial(this->rows_of_step(pipe.steps + j));
    if constexpr (Base::MODIFIED) {
      exponentiate_modified(j, packed);
    } else {
#pragma unroll
      for (int g = 0; g < SCORES / 4; g++)
        exponentiate_group<Half, SOFTCAP>(scores + 4 * g, row_pair(lse_of(j), g), p.scale_log2, packed + 2 * g);
    }
    await_p_read(pipe.steps + j);
    this->put_fragments(scores, my_float4(C::P));
    arrive(bars.p_full());
  }
  DEVICE void exponentiate_modified(int j, u32 (&packed)[SCORES / 2]) {
    const int4 note = load_shared_i32x4(shared + C::SHARED_BYTES + stage(j) * MODIFIER_NOTE_BYTES);
    const int more_than_queries = more_keys<MASK>(notes, pipe, p.mask), q_row = StepNote{this->rows_of_step(pipe.steps + j)}.q_row();
    const int own = opaque(lane), key = opaque(warp) * 16 + (own >> 2);  // else all that follows from them would be kept in registers
    const ElementModifiers<DROPOUT, Base::ALIBI> change(note, *more, q_row, key, own, notes.keys(pipe), more_than_queries);
#pragma unroll
    for (int k = 0; k < SCORES / 8; k++) {
      const float2 lse[2] = {row_pair(lse_of(j), 2 * k), row_pair(lse_of(j), 2 * k + 1)};
      exponentiate_sixteen<Half, SOFTCAP>(change, k, scores + 8 * k, lse, p.scale_log2, packed + 4 * k);
    }
  }
  DEVICE void mask_partial(int rows) {
    const StepNote note{rows};
    if (!note.partial()) return;
    const int keys = notes.keys(pipe), from = notes.template mask_from<MASK>(pipe);
    const int local = warp * 16 + (lane >> 2), query = note.q_row() + 2 * (lane & 3);
    const KeyMask<MASK> low(local, keys, from), high(local + 8, keys, from);
    mask_scores(scores, p.mask, low, high, query, p.masked_score);
  }
  DEVICE int lse_of(int j) const { return C::LSE + stage(j) * C::ROW_BYTES; }
  DEVICE int delta_of(int j) const { return C::DELTA + do_stage(j) * C::ROW_BYTES; }
  // dS = P (dP - delta), packed, and to shared memory as [query][key]. delta goes with dO, which may be overwritten from here on.
  DEVICE void differentiate(int j, u32 (&packed)[SCORES / 2]) {
    if constexpr (DROPOUT) {  // P tells what is dropped
      bars.p_full().wait((pipe.steps + j) & 1);
#pragma unroll
      for (int g = 0; g < SCORES / 4; g++) {
        const float4 v = probability(g);
        const float weights[4] = {v.x, v.y, v.z, v.w};
        differentiate_dropped<Half>(weights, scores + 4 * g, row_pair(delta_of(j), g), more->rescale, packed + 2 * g);
      }
      arrive(bars.do_empty(do_stage(j)));
    } else {
#pragma unroll
      for (int g = 0; g < SCORES / 4; g++) subtract_delta(scores + 4 * g, row_pair(delta_of(j), g));
      arrive(bars.do_empty(do_stage(j)));
      bars.p_full().wait((pipe.steps + j) & 1);
#pragma unroll
      for (int g = 0; g < SCORES / 4; g++) multiply_by_p(scores + 4 * g, probability(g), packed + 2 * g);
    }
    arrive(bars.p_empty());
    bars.ds_empty(stage(j)).wait(phase(j) ^ 1);
    put_ds(j, packed);
  }
  DEVICE void put_ds(int j, const u32 (&ds)[SCORES / 2]) {
    const int chunk = (2 * warp + ((lane >> 3) & 1)) ^ (lane & 7);
    const u32 at = shared + C::DS + stage(j) * C::DS_BYTES + ((lane >> 4) * 8 + (lane & 7)) * PANEL_ROW + chunk * 16;
#pragma unroll
    for (int k = 0; k < C::Q_ROWS / 16; k++) stmatrix_transposed(at + k * SIXTEEN_ROWS, ds + 4 * k);
  }
  static DEVICE void subtract_delta(float* dp, float2 delta) {
#pragma unroll
    for (int e = 0; e < 4; e++) dp[e] -= (e & 1) ? delta.y : delta.x;
  }
  static DEVICE void multiply_by_p(const float* dp, float4 probability, u32* packed) {
    packed[0] = pack<Half>(probability.x * dp[0], probability.y * dp[1]);
    packed[1] = pack<Half>(probability.z * dp[2], probability.w * dp[3]);
  }

  // ---- what leaves the registers
  // The pieces of dQ go through one buffer in turn.
  DEVICE u32 staging() const { return my_float4(C::DQ + wg * C::OWN_BYTES); }
  DEVICE void put_own(float (&own)[OWN]) {
    pin(own);
    bars.dq_empty(wg).wait(1);
    this->put_fragments(own, staging());
  }
  DEVICE void put_inner(float (&inner)[INNER], int j) {
    pin(inner);
    arrive(bars.ds_empty(stage(j)));
    bars.dq_empty(wg).wait(0);
    this->put_fragments(inner, staging());
    publish(bars.dq_full(stage(j), wg));
  }
  // Half of the columns of a chain's dV or dK, as they are in registers: as dQ of step j would.
  template <int HALF> DEVICE void put_sum(int j) {
    put_half<HALF*(OWN + INNER), OWN>(j, 1);
    put_half<HALF*(OWN + INNER) + OWN, INNER>(j, 0);
  }
  template <int FIRST, int N> DEVICE void put_half(int j, u32 phase) {
    bars.dq_empty(wg).wait(phase);
    this->put_fragments(*(const float (*)[N])(sum + FIRST), staging(), VALUES ? this->dv_factor() : 1.f);
    publish(bars.dq_full(stage(j), wg));
  }
  // dV or dK as put_sum left it. Of legs, it begins as a state and ends as such.
  DEVICE void take_state(const float* states) {
    const i64 piece = notes.first_sum(pipe) - p.first_sum;
    const float4* from = (const float4*)(states + piece * C::SUM_FLOATS) + state_quad<C>(wg, 0) + warp * 32 + lane;
#pragma unroll
    for (int first = 0; first < SUM; first += 4) {
      const float4 v = __ldcg(from + state_quad<C>(0, first));
      sum[first] = v.x, sum[first + 1] = v.y, sum[first + 2] = v.z, sum[first + 3] = v.w;
    }
  }
  // Panels of a finished tile of dV or dK, as many as there is room for.
  template <int FIRST> DEVICE void store_panels(const TensorMap* map) {
    constexpr int COLUMN = 64 * FIRST, END = FIRST + C::OUT_PANELS < C::PANELS ? COLUMN + 64 * C::OUT_PANELS : D;
    this->await_stored();
#pragma unroll
    for (int i = 0; i < (END - COLUMN) / 64; i++) put_panel(sum + 32 * (FIRST + i), shared + OUT + i * C::KV_PANEL);
    fence_async_shared();
    this->sync_warpgroup();
    if (elects()) this->template store_columns<COLUMN, END>(map, notes.chain(pipe));
  }
  DEVICE void put_panel(const float* columns, u32 at) {
    const float factor = VALUES ? this->dv_factor() : p.scale;
#pragma unroll
    for (int g = 0; g < 4; g++) {
      u32 r[4];
#pragma unroll
      for (int i = 0; i < 4; i++) r[i] = pack<Half>(columns[8 * g + 2 * i] * factor, columns[8 * g + 2 * i + 1] * factor);
      const int row = warp * 16 + (lane & 15), chunk = (2 * g + (lane >> 4)) ^ (lane & 7);
      stmatrix(at + row * PANEL_ROW + chunk * 16, r);
    }
  }
};
