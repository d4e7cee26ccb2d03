// The consumers of wide heads (WideConfig). A warpgroup computes the scores of 32 of the 64 queries with all 64 keys, and dV,
// dK and dQ in its own columns. Both halves of P and dS meet in shared memory, in two buffers each.
#pragma once
#include "backward/config.cuh"
#include "backward/elementwise.cuh"
#include "common/wgmma.cuh"

template <typename Half, int D, bool SOFTCAP, MaskKind MASK> struct WideConsumer {
  using C = BackwardConfig<D>;
  static constexpr int SCORES = 16, OWN = 32, INNER = C::INNER / 2;  // registers: 64 keys x 32 queries, 64 rows x columns

  const BackwardParams& p;
  Notes<C> notes;
  Barriers<C> bars;
  u32 shared;
  int wg, warp, lane;     // warp inside the warpgroup
  float dk_own[OWN], dk_inner[INNER], dv_own[OWN], dv_inner[INNER], s[SCORES];

  DEVICE WideConsumer(const BackwardParams& params, u32 shared_base, int warp_of_block, int lane_of_warp)
      : p(params), notes{shared_base}, bars{shared_base}, shared(shared_base), wg(warp_of_block / 4 - 1), warp(warp_of_block & 3),
        lane(lane_of_warp) {}

  DEVICE void run(const TensorMap* dk_map, const TensorMap* dv_map) {
    Pipeline pipe;
    u32 kv_loads = 0;
    int last_stage = -1;  // of the step before; its second piece of dQ must have left before the next first one comes
    while (true) {
      notes.await_chain(pipe);
      const int steps = notes.chain(pipe).steps;
      if (steps < 0) break;
#pragma unroll
      for (int i = 0; i < OWN; i++) dk_own[i] = dv_own[i] = 0.f;
#pragma unroll
      for (int i = 0; i < INNER; i++) dk_inner[i] = dv_inner[i] = 0.f;
      if (steps > 0) {
        walk_chain(steps, pipe, kv_loads & 1, last_stage);
        last_stage = (steps - 1) & 1;
        arrive(bars.kv_empty());
        kv_loads++;
      }
      if (p.sums == nullptr) {
        store_tile(dv_own, dv_inner, 1.f, dv_map, notes.chain(pipe));
        store_tile(dk_own, dk_inner, p.scale, dk_map, notes.chain(pipe));
      } else {
        put_sum(dv_own, dv_inner, steps & 1, last_stage);
        last_stage = steps & 1;
        put_sum(dk_own, dk_inner, last_stage ^ 1, last_stage);
        last_stage ^= 1;
      }
      arrive(bars.chain_empty(pipe.chain_slot()));
      pipe.finish_chain(steps, sum_pieces<C>(p));
    }
    if (wg == 0 && warp == 0 && lane == 0) bulk_wait();
  }

 private:
  DEVICE void arrive(Barrier barrier) {
    __syncwarp();
    if (lane == 0) barrier.arrive();
  }

  DEVICE void walk_chain(int steps, const Pipeline& pipe, u32 kv_phase, int last_stage) {
    bars.k_full().wait(kv_phase);
    step<0, true, false, false>(0, pipe, kv_phase, last_stage);
    int j = 1;
    // Two steps per trip: S of the second is issued behind the products of the first, but not over the back edge (ptxas).
    for (; j + 1 < steps; j += 2) {
      step<1, false, false, true>(j, pipe, kv_phase, 0);
      step<0, false, true, false>(j + 1, pipe, kv_phase, 1);
    }
    if (j < steps) step<1, false, false, false>(j, pipe, kv_phase, 0);
  }

  // One Q tile. STAGE is its parity; S_AHEAD: its S was issued by the step before; NEXT_S: this step issues the next one's.
  template <int STAGE, bool FIRST, bool S_AHEAD, bool NEXT_S>
  DEVICE void step(int j, const Pipeline& pipe, u32 kv_phase, int stage_before) {
    const u32 number = pipe.steps + j;
    float dp[SCORES];
    u32 packed[SCORES / 2];
    if constexpr (!S_AHEAD) multiply_s<STAGE>(j, pipe);
    const int rows = load_shared_i32(notes.step_at(number));
    if constexpr (FIRST) bars.v_full().wait(kv_phase);
    bars.do_full(0).wait(number & 1);
    multiply_scores<C::V, C::DO>(dp);
    wgmma_wait<1>();  // S
    pin(s);
    if constexpr (SOFTCAP) cap_scores(s, p.cap_scale);
    mask_partial(s, rows, pipe);
    exponentiate<STAGE>(s, packed);
    if constexpr (FIRST) await_stored();
    put_tile<C::P + STAGE * C::TILE>(packed);
    fence_async_shared();
    named_barrier_sync<BOTH>(2 * WARPGROUP);  // both halves of P
    multiply_rows<C::P + STAGE * C::TILE, C::DO>(dv_own, dv_inner);
    wgmma_wait<1>();  // dP
    pin(dp);
    differentiate(s, dp, packed);
    put_tile<C::DS + STAGE * C::TILE>(packed);
    fence_async_shared();
    named_barrier_sync<BOTH_AGAIN>(2 * WARPGROUP);  // both halves of dS
    float dq_own[OWN];
    multiply_dq<STAGE>(dq_own, own_offset(C::KV_PANEL));
    multiply_rows<C::DS + STAGE * C::TILE, C::Q + STAGE * C::Q_BYTES>(dk_own, dk_inner);
    wgmma_wait<2>();  // dV
    arrive(bars.do_empty(0));
    wgmma_wait<1>();  // dQ, own columns
    pin(dq_own);
    if (stage_before >= 0) bars.dq_empty(stage_before).wait(1);
    put_dq(dq_own, STAGE);
    float dq_inner[INNER];
    multiply_dq<STAGE>(dq_inner, inner_offset(C::KV_PANEL));
    if constexpr (NEXT_S) multiply_s<STAGE ^ 1>(j + 1, pipe);
    wgmma_wait<NEXT_S ? 2 : 1>();  // dK
    arrive(bars.q_empty(STAGE));
    wgmma_wait<NEXT_S ? 1 : 0>();
    pin(dq_inner);
    pin(dk_own);
    pin(dk_inner);
    pin(dv_own);
    pin(dv_inner);
    bars.dq_empty(STAGE).wait(0);
    put_dq(dq_inner, STAGE);
  }

  // ---- products
  template <int STAGE> DEVICE void multiply_s(int j, const Pipeline& pipe) {
    bars.q_full(STAGE).wait(pipe.template phase<STAGE>(j));
    multiply_scores<C::K, C::Q + STAGE * C::Q_BYTES>(s);
  }
  // S^T = K Q^T or dP^T = V dO^T, 64 keys x this warpgroup's 32 queries.
  template <int KEYS, int QUERIES> DEVICE void multiply_scores(float (&d)[SCORES]) {
    const u32 a = opaque(shared >> 4), b = a + wg * (32 * PANEL_ROW / DESCRIPTOR_UNIT);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < D / 16; k++)
      wgmma_ss<Half, 0, 0>(k > 0, d, descriptor(a + descriptor_low(KEYS + (k / 4) * C::KV_PANEL + (k % 4) * SIXTEEN_COLUMNS)),
                           descriptor(b + descriptor_low(QUERIES + (k / 4) * C::Q_PANEL + (k % 4) * SIXTEEN_COLUMNS)));
    wgmma_commit();
  }
  // dV += P^T dO or dK += dS^T Q: all 64 keys, this warpgroup's columns.
  template <int TILE, int ROWS> DEVICE void multiply_rows(float (&own)[OWN], float (&inner)[INNER]) {
    const u32 a = opaque(shared >> 4), b = a + own_offset(C::Q_PANEL), c = a + inner_offset(C::Q_PANEL);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::Q_ROWS / 16; k++) {
      const u64 tile = descriptor(a + descriptor_low(TILE + k * SIXTEEN_ROWS));
      wgmma_ss<Half, 1, 1>(true, own, tile, descriptor(b + descriptor_low(ROWS + k * SIXTEEN_ROWS)));
      wgmma_ss<Half, 1, 1>(true, inner, tile, descriptor(c + descriptor_low(ROWS + k * SIXTEEN_ROWS)));
    }
    wgmma_commit();
  }
  template <int STAGE, int N> DEVICE void multiply_dq(float (&d)[N], u32 columns) {  // dQ = dS K
    const u32 a = opaque(shared >> 4), b = a + columns;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::KV_ROWS / 16; k++)
      wgmma_ss<Half, 0, 1>(k > 0, d, descriptor(a + descriptor_low(C::DS + STAGE * C::TILE + k * SIXTEEN_COLUMNS)),
                           descriptor(b + descriptor_low(C::K + k * SIXTEEN_ROWS)));
    wgmma_commit();
  }
  DEVICE u32 own_offset(int panel) { return C::own_panel(wg) * (panel / DESCRIPTOR_UNIT); }
  DEVICE u32 inner_offset(int panel) {
    return (C::inner_column(wg) / 64) * (panel / DESCRIPTOR_UNIT) + (C::inner_column(wg) % 64) * 2 / DESCRIPTOR_UNIT;
  }

  // ---- element-wise work (backward/elementwise.cuh)
  DEVICE float2 row_pair(int rows, int g) { return load_shared_f32x2(shared + rows + wg * 128 + (lane & 3) * 8 + g * 32); }
  DEVICE void mask_partial(float (&s)[SCORES], int rows, const Pipeline& pipe) {
    const StepNote note{rows};
    if (!note.partial()) return;
    const int keys = notes.keys(pipe), from = notes.template mask_from<MASK>(pipe);
    const int local = warp * 16 + (lane >> 2), query = note.q_row() + wg * 32 + 2 * (lane & 3);
    const KeyMask<MASK> low(local, keys, from), high(local + 8, keys, from);
    mask_scores(s, p.mask, low, high, query, p.masked_score);
  }
  template <int STAGE> DEVICE void exponentiate(float (&s)[SCORES], u32 (&packed)[SCORES / 2]) {
#pragma unroll
    for (int g = 0; g < SCORES / 4; g++)
      exponentiate_group<Half, SOFTCAP>(s + 4 * g, row_pair(C::LSE + STAGE * C::ROW_BYTES, g), p.scale_log2, packed + 2 * g);
  }
  DEVICE void differentiate(const float (&s)[SCORES], const float (&dp)[SCORES], u32 (&packed)[SCORES / 2]) {
#pragma unroll
    for (int g = 0; g < SCORES / 4; g++) differentiate_group<Half>(s + 4 * g, dp + 4 * g, row_pair(C::DELTA, g), packed + 2 * g);
  }

  // ---- what leaves the registers
  template <int AT> DEVICE void put_tile(const u32 (&tile)[SCORES / 2]) {  // [query][key]
    const int chunk = (2 * warp + ((lane >> 3) & 1)) ^ (lane & 7);
    const u32 at = shared + AT + (wg * 32 + (lane >> 4) * 8 + (lane & 7)) * PANEL_ROW + chunk * 16;
#pragma unroll
    for (int k = 0; k < 2; k++) stmatrix_transposed(at + k * SIXTEEN_ROWS, tile[4 * k], tile[4 * k + 1], tile[4 * k + 2], tile[4 * k + 3]);
  }
  template <int N> DEVICE void put_dq(const float (&d)[N], int stage) {  // fragment order: the postprocess kernel unscrambles
    const u32 at = shared + C::DQ + wg * (N * WARPGROUP * 4) + (warp * 32 + lane) * 16;
#pragma unroll
    for (int i = 0; i < N / 4; i++) store_shared_f32x4(at + i * (WARPGROUP * 16), d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]);
    fence_async_shared();
    arrive(bars.dq_full(stage));
  }
  // A chain's dV or dK, as it is in registers: as dQ leaves.
  DEVICE void put_sum(const float (&own)[OWN], const float (&inner)[INNER], int stage, int stage_before) {
    if (stage_before >= 0) bars.dq_empty(stage_before).wait(1);
    put_dq(own, stage);
    bars.dq_empty(stage).wait(0);
    put_dq(inner, stage);
  }
  // dK and dV leave through the P and dS buffers: nobody may write there before the last store has read them, and no store
  // before both warpgroups are done with them.
  DEVICE void await_stored() {
    if (wg == 0 && warp == 0 && lane == 0) bulk_wait_read();
    named_barrier_sync<BOTH>(2 * WARPGROUP);
  }
  // A finished tile of dK or dV: each warpgroup writes its columns, one thread stores all panels.
  DEVICE void store_tile(const float (&own)[OWN], const float (&inner)[INNER], float factor, const TensorMap* map, const ChainNote& chain) {
    await_stored();
    put_columns(own, 64 * C::own_panel(wg), factor);
    put_columns(inner, C::inner_column(wg), factor);
    fence_async_shared();
    named_barrier_sync<BOTH>(2 * WARPGROUP);
    if (wg == 0 && warp == 0 && lane == 0) {
      for (int i = 0; i < C::PANELS; i++)
        tma_store<MASK == MaskKind::Packed>(map, shared + C::OUT + i * C::KV_PANEL, i * 64, chain.kv_head, chain.kv_row, chain.kv_plane);
      bulk_commit();
    }
  }
  template <int N> DEVICE void put_columns(const float (&tile)[N], int first_column, float factor) {
#pragma unroll
    for (int g = 0; g < N / 8; g++) {
      u32 r[4];
#pragma unroll
      for (int i = 0; i < 4; i++) r[i] = pack<Half>(tile[8 * g + 2 * i] * factor, tile[8 * g + 2 * i + 1] * factor);
      const int column = first_column + 16 * g, row = warp * 16 + (lane & 15), chunk = (column % 64 / 8 + (lane >> 4)) ^ (lane & 7);
      stmatrix(shared + C::OUT + (column / 64) * C::KV_PANEL + row * PANEL_ROW + chunk * 16, r[0], r[1], r[2], r[3]);
    }
  }
};
