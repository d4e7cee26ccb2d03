// The consumers of heads whose keys are wide and whose values are not (TallConfig beyond D = 128). As Consumer, but the
// accumulators leave 56 registers: one tile of scores, or dQ, and some 16-bit pairs. So S becomes P in 16 bits before dP comes,
// and products follow each other; those of P and dS start as soon as a part of them is there.
#pragma once
#include "backward/config.cuh"
#include "backward/elementwise.cuh"
#include "backward/modified_elements.cuh"
#include "common/wgmma.cuh"

template <typename Half, int D, int DV, bool SOFTCAP, MaskKind MASK, bool LEGS = false, bool DROPOUT = false, bool ALIBI = false>
struct NarrowValueConsumer {
  using C = BackwardConfig<D, DV>;
  static constexpr int Q_ROWS = C::Q_ROWS, KV_ROWS = C::KV_ROWS, SCORES = C::SCORE_REGISTERS, PAIRS = SCORES / 2;
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

  const BackwardParams& p;
  const ModifierParams* m;  // of dropout and ALiBi
  Notes<C> notes;
  Barriers<C> bars;
  u32 shared;
  int wg;
  u32 thread;  // of the warpgroup; what follows from it is computed anew where it is needed, as registers are scarce
  int left;    // steps of the chain still to come
  float dk[D / 2], dv[DV / 2], s[SCORES];

  DEVICE NarrowValueConsumer(const BackwardParams& params, u32 shared_base, int warp_of_block, int lane_of_warp,
                             const ModifierParams* modifiers = nullptr)
      : p(params), m(modifiers), notes{shared_base}, bars{shared_base}, shared(shared_base), wg(warp_of_block / 4 - 1),
        thread(warp_of_block % 4 * WARP + lane_of_warp) {}

  // Of legs (backward/legs.cuh), dK and dV begin as states and end as such: there are no maps.
  DEVICE void run(const TensorMap* dk_map, const TensorMap* dv_map, const LegParams* legs = nullptr) {
    Progress at;
    while (true) {
      notes.await_chain(at.chain());
      left = notes.chain(at.chain()).steps;
      if (left < 0) break;
      clear(dk);
      clear(dv);
      if constexpr (LEGS)
        if (legs->states != nullptr) take_state(legs->states, at);
      if (left > 0) {
        walk_chain(at);
        arrive(bars.kv_empty());
        at.bits ^= Progress::KV;
      }
      if (!LEGS && p.sums == nullptr) {
        store_tile<0, DV>(dv, DROPOUT ? DROP * m->rescale : DROP, dv_map, notes.chain(at.chain()));
        store_tile<0, 128>(dk, p.scale, dk_map, notes.chain(at.chain()));
        store_tile<128, D>(dk, p.scale, dk_map, notes.chain(at.chain()));
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
    const int rows = load_shared_i32(notes.step_at(at.number()));
    Bits bits;
    if constexpr (EARLY_BITS) bits = bits_of(rows);
    float2 lse[EARLY_LSE];
#pragma unroll
    for (int g = 0; g < EARLY_LSE; g++) lse[g] = row_pair(C::LSE + STAGE * C::ROW_BYTES, g);
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
      if constexpr (DROPOUT || ALIBI)
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
#pragma unroll
    for (int g = 0; g < EARLY_DELTA; g++) delta[g] = row_pair(C::DELTA, g);
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
    if constexpr (FIRST) await_stored();
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
    put_dq(dq);
    publish(bars.dq_full(STAGE));
  }

  // ---- products
  template <int STAGE> DEVICE void multiply_s() {  // S^T = K Q^T
    const u32 b = base(), a = b + wg * (HALF_PANEL / DESCRIPTOR_UNIT);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < D / 16; k++)
      wgmma_ss<Half, 0, 0>(k > 0, s, descriptor(a + descriptor_low(C::K + C::k_panel(k / 4) * C::KV_PANEL + (k % 4) * SIXTEEN_COLUMNS)),
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
  // Sixteen queries of dV or dK; a commit ends the product.
  template <int N> DEVICE void multiply_rows(float (&d)[N], const u32 (&a)[PAIRS], int rows, int k) {
    wgmma_fence();
    wgmma_rs<Half, 1>(d, a + 4 * k, descriptor(base() + descriptor_low(rows + k * SIXTEEN_ROWS, C::Q_PANEL)));
  }
  // dQ = dS K, in a whole panel of columns and half of the middle one, which lies two panels behind the first and one behind the last.
  template <int STAGE> DEVICE void multiply_dq(float (&dq)[C::DQ_REGISTERS]) {
    constexpr u32 NEARER = descriptor_low(0, C::KV_PANEL - 64);
    const u32 a = base(), b = a + wg * (C::KV_PANEL / DESCRIPTOR_UNIT - NEARER);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < KV_ROWS / 16; k++)
      wgmma_ss<Half, 0, 1>(k > 0, dq,
                           descriptor(a + descriptor_low(C::DS + STAGE * C::DS_BYTES + (k / 4) * C::Q_PANEL + (k % 4) * SIXTEEN_COLUMNS)),
                           descriptor(b + descriptor_low(C::K + k * SIXTEEN_ROWS, 2 * C::KV_PANEL)));
    wgmma_commit();
  }

  // ---- element-wise work
  DEVICE float2 row_pair(int rows, int g) { return load_shared_f32x2(shared + rows + (thread & 3) * 8 + g * 32); }

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
      const float2 lse = g < EARLY_LSE ? early[g < EARLY_LSE ? g : 0] : row_pair(C::LSE + STAGE * C::ROW_BYTES, g);
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
    const int more = more_keys<MASK>(notes, at.chain(), p.mask);
    const u32 own = opaque(thread), lane = own % WARP, warp = own / WARP;
    const int key = wg * 64 + warp * 16 + (lane >> 2);
    const ElementModifiers<DROPOUT, ALIBI> change(note, *m, StepNote{rows}.q_row(), key, lane, notes.keys(at.chain()), more);
    float2 lift[2];
#pragma unroll
    for (int g = 2 * k; g < 2 * k + 2; g++) {
      const float2 lse = g < EARLY_LSE ? early[g < EARLY_LSE ? g : 0] : row_pair(C::LSE + STAGE * C::ROW_BYTES, g);
      lift[g - 2 * k] = make_float2(lse.x - LIFT, lse.y - LIFT);
    }
    float x[8];
    exponentiate_sixteen<SOFTCAP>(change, k, s + 8 * k, lift, p.scale_log2, x);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      probability[4 * k + i] = pack_kept<Half, DROPOUT>(x[2 * i], x[2 * i + 1]);
      if constexpr (HAS_WEIGHTS) weights[4 * k + i] = pack<f16>(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
    }
  }
  // dS = P (dP - delta), likewise.
  DEVICE void differentiate(int k, const float2 (&early)[EARLY_DELTA], const u32 (&weights)[PAIRS], const float (&dp)[SCORES],
                            u32 (&ds)[PAIRS]) {
#pragma unroll
    for (int g = 2 * k; g < 2 * k + 2; g++) {
      const float2 delta = g < EARLY_DELTA ? early[g < EARLY_DELTA ? g : 0] : row_pair(C::DELTA, g);
      const float2 dropped = make_float2(-DROP * delta.x, -DROP * delta.y);  // not by dropout: the lift of P
#pragma unroll
      for (int i = 2 * g; i < 2 * g + 2; i++) {
        const float2 weight = unpack<f16>(weights[i]);
        if constexpr (DROPOUT) {
          const float rescale = DROP * m->rescale;
          ds[i] = pack<Half>(weight.x * dropped_difference(weight.x, dp[2 * i], rescale, -dropped.x),
                             weight.y * dropped_difference(weight.y, dp[2 * i + 1], rescale, -dropped.y));
          continue;
        }
        ds[i] = pack<Half>(weight.x * fmaf(dp[2 * i], DROP, dropped.x), weight.y * fmaf(dp[2 * i + 1], DROP, dropped.y));
      }
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
  DEVICE void put_dq(const float (&dq)[C::DQ_REGISTERS]) {  // fragment order: the postprocess kernel unscrambles
    const u32 at = shared + C::DQ + wg * (C::DQ_BYTES / 2) + opaque(thread) * 16;
#pragma unroll
    for (int i = 0; i < C::DQ_REGISTERS / 4; i++)
      store_shared_f32x4(at + i * (WARPGROUP * 16), dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
  }
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
    const u32 at = shared + C::DQ + wg * (C::SUM_FLOATS * 2) + opaque(thread) * 16;
#pragma unroll
    for (int i = 0; i < C::SUM_REGISTERS / 4; i++) {
      const int first = PIECE * C::SUM_REGISTERS + 4 * i;
      const float* r = first < DV / 2 ? dv + first : dk + first - DV / 2;
      const float factor = !LEGS && first < DV / 2 ? (DROPOUT ? DROP * m->rescale : DROP) : 1.f;  // of a state, the ending drops it
      store_shared_f32x4(at + i * (WARPGROUP * 16), r[0] * factor, r[1] * factor, r[2] * factor, r[3] * factor);
    }
    publish(bars.dq_full(stage));
  }
  // dV and dK as put_sum left them.
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
  // dK and dV leave through the dS buffers: nobody may write there before the last store has read them, and no store
  // before both warpgroups are done with dS.
  DEVICE void await_stored() {
    if (elects()) bulk_wait_read();
    named_barrier_sync<BOTH>(2 * WARPGROUP);
  }
  // Some columns of a finished half of dK or dV, through this warpgroup's part of the dS buffers.
  template <int COLUMN, int END, int N>
  DEVICE void store_tile(float (&tile)[N], float factor, const TensorMap* map, const ChainNote& chain) {
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
