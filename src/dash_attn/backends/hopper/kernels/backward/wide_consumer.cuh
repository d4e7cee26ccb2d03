// The consumers of wide heads (WideConfig). The first warpgroup (VALUES) computes S and P and sums dV = P^T dO; the second computes
// dP and dS and sums dK = dS^T Q. P goes to the second in fp32: both have the same fragments, so every thread reads what its
// counterpart wrote. dS goes through shared memory for dQ = dS K, of which each warpgroup computes half of the columns one step
// late, in two pieces: behind its element-wise work and behind its sum. They meet at no barrier: each waits only for the tile it needs
// next.
#pragma once
#include "backward/config.cuh"
#include "backward/elementwise.cuh"
#include "backward/modified_elements.cuh"
#include "common/wgmma.cuh"

template <typename Half, int D, bool SOFTCAP, MaskKind MASK, bool VALUES, bool LEGS = false, bool DROPOUT = false, bool ALIBI = false>
struct WideConsumer {
  using C = BackwardConfig<D>;
  static constexpr int WG = VALUES ? 0 : 1, SCORES = 32, SUM = D / 2, OWN = 32, INNER = C::INNER / 2;  // registers
  static constexpr int OUT = VALUES ? C::P : C::DS;
  static constexpr bool DQ_LATE = VALUES && SOFTCAP && D == 256;  // behind the element-wise work, which needs the registers
  using Bits = OwnBits<MASK, SCORES, WARPGROUP>;

  const BackwardParams& p;
  const ModifierParams* m;  // of dropout and ALiBi
  Notes<C> notes;
  Barriers<C> bars;
  u32 shared;
  int warp, lane;  // warp inside the warpgroup
  Pipeline pipe;
  float sum[SUM], scores[SCORES];  // dV and S, or dK and dP
  Bits bits;                       // of the scores that come next

  DEVICE WideConsumer(const BackwardParams& params, u32 shared_base, int warp_of_block, int lane_of_warp,
                      const ModifierParams* modifiers = nullptr)
      : p(params), m(modifiers), notes{shared_base}, bars{shared_base}, shared(shared_base), warp(warp_of_block & 3), lane(lane_of_warp) {}

  // Of legs (backward/legs.cuh), the sum begins as a state and ends as such: there is no map.
  DEVICE void run(const TensorMap* map, const LegParams* legs = nullptr) {
    u32 kv_loads = 0;
    while (true) {
      notes.await_chain(pipe);
      const int steps = notes.chain(pipe).steps;
      if (steps < 0) break;
#pragma unroll
      for (int i = 0; i < SUM; i++) sum[i] = 0.f;
      if constexpr (LEGS)
        if (legs->states != nullptr) take_state(legs->states);
      if (steps > 0) walk_chain(steps, kv_loads++ & 1);
      if (!LEGS && p.sums == nullptr) {
        store_panels<0>(map);
        store_panels<C::OUT_PANELS>(map);
      } else {
        put_sum<0>(steps);
        put_sum<1>(steps + 1);
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
  // What this warp has stored may be read by wgmma and TMA.
  DEVICE void publish(Barrier barrier) {
    fence_async_shared();
    arrive(barrier);
  }
  DEVICE void sync_warpgroup() { named_barrier_sync<VALUES ? FIRST_HALF : SECOND_HALF>(WARPGROUP); }

  DEVICE void walk_chain(int steps, u32 kv_phase) {
    bars.k_full().wait(kv_phase);
    if constexpr (!VALUES) bars.v_full().wait(kv_phase);
    multiply_scores(0);
    wgmma_wait<0>();
    pin(scores);
    await_stored();
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
    if constexpr (BEFORE) multiply_dq(inner, j - 1, C::inner_column(WG));
    if constexpr (!VALUES || BEFORE) fence_async_shared();  // behind the products: it waits until what was stored has landed
    if constexpr (!VALUES) arrive(bars.ds_full(stage(j)));
    if constexpr (BEFORE) arrive(bars.dq_full(stage(j - 1), WG));
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
    multiply_dq(inner, j, C::inner_column(WG));
    wgmma_wait<0>();
    arrive(bars.kv_empty());
    put_own(own);
    publish(bars.dq_full(stage(j), WG));
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
    if constexpr (VALUES && MASK == MaskKind::Bits) bits = bits_of(j);
    const u32 a = opaque(shared >> 4), b = a + (VALUES ? stage(j) : do_stage(j)) * (C::Q_BYTES / DESCRIPTOR_UNIT);
    constexpr int KEYS = VALUES ? C::K : C::V, QUERIES = VALUES ? C::Q : C::DO;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < D / 16; k++)
      wgmma_ss<Half, 0, 0>(k > 0, scores, descriptor(a + descriptor_low(KEYS + (k / 4) * C::KV_PANEL + (k % 4) * SIXTEEN_COLUMNS)),
                           descriptor(b + descriptor_low(QUERIES + (k / 4) * C::Q_PANEL + (k % 4) * SIXTEEN_COLUMNS)));
    wgmma_commit();
  }
  DEVICE void multiply_sum(int j, const u32 (&packed)[SCORES / 2]) {  // dV += P^T dO or dK += dS^T Q
    const u32 b = opaque(shared >> 4) + (VALUES ? do_stage(j) : stage(j)) * (C::Q_BYTES / DESCRIPTOR_UNIT);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::Q_ROWS / 16; k++)
      wgmma_rs<Half, 1>(sum, packed + 4 * k, descriptor(b + descriptor_low((VALUES ? C::DO : C::Q) + k * SIXTEEN_ROWS, C::Q_PANEL)));
    wgmma_commit();
  }
  DEVICE void multiply_own(float (&own)[OWN], int j) {
    bars.ds_full(stage(j)).wait(phase(j));
    multiply_dq(own, j, C::own_column(WG));
  }
  template <int N> DEVICE void multiply_dq(float (&d)[N], int j, int column) {  // dQ = dS K, 2 N columns of it
    const u32 b = opaque(shared >> 4), a = b + stage(j) * (C::DS_BYTES / DESCRIPTOR_UNIT);
    const u32 k_at = b + (column / 64) * (C::KV_PANEL / DESCRIPTOR_UNIT) + (column % 64) * 2 / DESCRIPTOR_UNIT;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::KV_ROWS / 16; k++)
      wgmma_ss<Half, 0, 1>(k > 0, d, descriptor(a + descriptor_low(C::DS + k * SIXTEEN_COLUMNS)),
                           descriptor(k_at + descriptor_low(C::K + k * SIXTEEN_ROWS)));
    wgmma_commit();
  }

  // ---- element-wise work (backward/elementwise.cuh)
  DEVICE float2 row_pair(int rows, u32 at_stage, int g) {
    return load_shared_f32x2(shared + rows + at_stage * C::ROW_BYTES + (lane & 3) * 8 + g * 32);
  }
  DEVICE u32 my_float4(int at) { return shared + at + (warp * 32 + lane) * 16; }  // of a tile in fragment order; 128 of them per group

  // P, packed, and in fp32 for the other warpgroup.
  DEVICE void exponentiate(int j, u32 (&packed)[SCORES / 2]) {
    if constexpr (SOFTCAP) cap_scores(scores, p.cap_scale);
    if constexpr (MASK == MaskKind::Bits)
      bits.apply(scores, p.masked_score);
    else
      mask_partial(load_shared_i32(notes.step_at(pipe.steps + j)));
    if constexpr (DROPOUT || ALIBI) {
      exponentiate_modified(j, packed);
    } else {
#pragma unroll
      for (int g = 0; g < SCORES / 4; g++)
        exponentiate_group<Half, SOFTCAP>(scores + 4 * g, row_pair(C::LSE, stage(j), g), p.scale_log2, packed + 2 * g);
    }
    await_p_read(pipe.steps + j);
    put_fragments(scores, C::P);
    arrive(bars.p_full());
  }
  DEVICE Bits bits_of(int j) { return {p.mask, load_shared_i32(notes.step_at(pipe.steps + j)), opaque(warp * WARP + lane)}; }
  DEVICE void exponentiate_modified(int j, u32 (&packed)[SCORES / 2]) {
    const int4 note = load_shared_i32x4(shared + C::SHARED_BYTES + stage(j) * MODIFIER_NOTE_BYTES);
    const int more = more_keys<MASK>(notes, pipe, p.mask);
    const int q_row = StepNote{load_shared_i32(notes.step_at(pipe.steps + j))}.q_row();
    const int own = opaque(lane), key = opaque(warp) * 16 + (own >> 2);  // else all that follows from them would be kept in registers
    const ElementModifiers<DROPOUT, ALIBI> change(note, *m, q_row, key, own, notes.keys(pipe), more);
#pragma unroll
    for (int k = 0; k < SCORES / 8; k++) {
      const float2 lse[2] = {row_pair(C::LSE, stage(j), 2 * k), row_pair(C::LSE, stage(j), 2 * k + 1)};
      float x[8];
      exponentiate_sixteen<SOFTCAP>(change, k, scores + 8 * k, lse, p.scale_log2, x);
#pragma unroll
      for (int i = 0; i < 4; i++) packed[4 * k + i] = pack_kept<Half, DROPOUT>(x[2 * i], x[2 * i + 1]);
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
  // dS = P (dP - delta), packed, and to shared memory as [query][key]. delta goes with dO, which may be overwritten from here on.
  DEVICE void differentiate(int j, u32 (&packed)[SCORES / 2]) {
    if constexpr (DROPOUT) {  // P tells what is dropped
      bars.p_full().wait((pipe.steps + j) & 1);
#pragma unroll
      for (int g = 0; g < SCORES / 4; g++) {
        const float4 v = load_shared_f32x4(my_float4(C::P) + g * (WARPGROUP * 16));
        const float weights[4] = {v.x, v.y, v.z, v.w};
        differentiate_dropped<Half>(weights, scores + 4 * g, row_pair(C::DELTA, do_stage(j), g), m->rescale, packed + 2 * g);
      }
      arrive(bars.do_empty(do_stage(j)));
    } else {
#pragma unroll
      for (int g = 0; g < SCORES / 4; g++) subtract_delta(scores + 4 * g, row_pair(C::DELTA, do_stage(j), g));
      arrive(bars.do_empty(do_stage(j)));
      bars.p_full().wait((pipe.steps + j) & 1);
#pragma unroll
      for (int g = 0; g < SCORES / 4; g++)
        multiply_by_p<Half>(scores + 4 * g, load_shared_f32x4(my_float4(C::P) + g * (WARPGROUP * 16)), packed + 2 * g);
    }
    arrive(bars.p_empty());
    bars.ds_empty(stage(j)).wait(phase(j) ^ 1);
    put_ds(j, packed);
  }
  DEVICE void put_ds(int j, const u32 (&ds)[SCORES / 2]) {
    const int chunk = (2 * warp + ((lane >> 3) & 1)) ^ (lane & 7);
    const u32 at = shared + C::DS + stage(j) * C::DS_BYTES + ((lane >> 4) * 8 + (lane & 7)) * PANEL_ROW + chunk * 16;
#pragma unroll
    for (int k = 0; k < C::Q_ROWS / 16; k++)
      stmatrix_transposed(at + k * SIXTEEN_ROWS, ds[4 * k], ds[4 * k + 1], ds[4 * k + 2], ds[4 * k + 3]);
  }

  // ---- what leaves the registers
  // 2 N columns of a tile in fragment order. Of dQ the postprocess kernel unscrambles them.
  template <int N> DEVICE void put_fragments(const float (&tile)[N], int at) {
#pragma unroll
    for (int i = 0; i < N / 4; i++)
      store_shared_f32x4(my_float4(at) + i * (WARPGROUP * 16), tile[4 * i], tile[4 * i + 1], tile[4 * i + 2], tile[4 * i + 3]);
  }
  // The pieces of dQ go through one buffer in turn.
  DEVICE void put_own(float (&own)[OWN]) {
    pin(own);
    bars.dq_empty(WG).wait(1);
    put_fragments(own, C::DQ + WG * C::OWN_BYTES);
  }
  DEVICE void put_inner(float (&inner)[INNER], int j) {
    pin(inner);
    arrive(bars.ds_empty(stage(j)));
    bars.dq_empty(WG).wait(0);
    put_fragments(inner, C::DQ + WG * C::OWN_BYTES);
    publish(bars.dq_full(stage(j), WG));
  }
  // Half of the columns of a chain's dV or dK, as they are in registers: as dQ of step j would.
  template <int HALF> DEVICE void put_sum(int j) {
    put_half<HALF*(OWN + INNER), OWN>(j, 1);
    put_half<HALF*(OWN + INNER) + OWN, INNER>(j, 0);
  }
  template <int FIRST, int N> DEVICE void put_half(int j, u32 phase) {
    bars.dq_empty(WG).wait(phase);
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
      const float* r = sum + FIRST + 4 * i;
      const u32 at = my_float4(C::DQ + WG * C::OWN_BYTES) + i * (WARPGROUP * 16);
      if constexpr (DROPOUT && VALUES)
        store_shared_f32x4(at, r[0] * m->rescale, r[1] * m->rescale, r[2] * m->rescale, r[3] * m->rescale);
      else
        store_shared_f32x4(at, r[0], r[1], r[2], r[3]);
    }
    publish(bars.dq_full(stage(j), WG));
  }
  // dV or dK as put_sum left it.
  DEVICE void take_state(const float* states) {
    const i64 piece = notes.first_sum(pipe) - p.first_sum;
    const float4* from = (const float4*)(states + piece * C::SUM_FLOATS) + state_quad<C>(WG, 0) + warp * 32 + lane;
#pragma unroll
    for (int first = 0; first < SUM; first += 4) {
      const float4 v = __ldcg(from + state_quad<C>(0, first));
      sum[first] = v.x, sum[first + 1] = v.y, sum[first + 2] = v.z, sum[first + 3] = v.w;
    }
  }
  // Until the last store has read the buffer that P or dS and the sums share.
  DEVICE void await_stored() {
    if (warp == 0 && lane == 0) bulk_wait_read();
    sync_warpgroup();
  }
  // Panels of a finished tile of dV or dK, as many as there is room for.
  template <int FIRST> DEVICE void store_panels(const TensorMap* map) {
    constexpr int COUNT = FIRST + C::OUT_PANELS < C::PANELS ? C::OUT_PANELS : C::PANELS - FIRST;
    await_stored();
#pragma unroll
    for (int i = 0; i < COUNT; i++) put_panel(sum + 32 * (FIRST + i), shared + OUT + i * C::KV_PANEL);
    fence_async_shared();
    sync_warpgroup();
    if (warp != 0 || lane != 0) return;
    const ChainNote chain = notes.chain(pipe);
    for (int i = 0; i < COUNT; i++)
      tma_store<MASK == MaskKind::Packed>(map, shared + OUT + i * C::KV_PANEL, (FIRST + i) * 64, chain.kv_head, chain.kv_row,
                                          chain.kv_plane);
    bulk_commit();
  }
  DEVICE void put_panel(const float* columns, u32 at) {
    const float factor = !VALUES ? p.scale : DROPOUT ? m->rescale : 1.f;
#pragma unroll
    for (int g = 0; g < 4; g++) {
      u32 r[4];
#pragma unroll
      for (int i = 0; i < 4; i++) r[i] = pack<Half>(columns[8 * g + 2 * i] * factor, columns[8 * g + 2 * i + 1] * factor);
      const int row = warp * 16 + (lane & 15), chunk = (2 * g + (lane >> 4)) ^ (lane & 7);
      stmatrix(at + row * PANEL_ROW + chunk * 16, r[0], r[1], r[2], r[3]);
    }
  }
};
