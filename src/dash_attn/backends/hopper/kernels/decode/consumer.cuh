// A warpgroup with 64 rows: S = Q K^T, online softmax, O += P V, one KV tile after the other. Every operation on a row is that of
// forward/consumer.cuh, in its order; tests compare the bits.
#pragma once
#include "decode/config.cuh"
#include "decode/places.cuh"
#include "common/product.cuh"

template <typename Half, int D, bool SOFTCAP> struct DecodeConsumer {
  using C = DecodeConfig<D>;
  static constexpr int LANES = sum_lanes(D);
  static constexpr int OWN_THREADS = 1;          // a barrier of the warpgroup
  const DecodeParams& p;
  const Unit& unit;
  u32 shared, base;
  int warp, lane;
  float s[C::SCORES], out[C::OUTPUTS];
  u32 probability[C::SCORES / 2];
  float row_max[2], row_sum[2];  // rows lane / 4 and lane / 4 + 8 of the warp; the sum over this thread's columns only

  DEVICE DecodeConsumer(const DecodeParams& params, const Unit& of_cta, u32 shared_base, int warp_of_block, int lane_of_warp)
      : p(params), unit(of_cta), shared(shared_base), base(shared_base >> 4), warp(warp_of_block), lane(lane_of_warp) {}

  DEVICE void run() {
    load_q();
#pragma unroll
    for (int i = 0; i < C::OUTPUTS; i++) out[i] = 0.f;
    row_max[0] = row_max[1] = MINUS_INFINITY;
    row_sum[0] = row_sum[1] = 0.f;
    const int row = unit.first_row + warp * 16 + (lane >> 2);
    const KeyRange low(p, row / p.group, unit.q_len, unit.keys), high(p, (row + 8) / p.group, unit.q_len, unit.keys);
    Ring<C> ring{shared};
    int tile = unit.last_tile<C::KV_ROWS>();
#pragma unroll 1
    for (int left = unit.visits<C::KV_ROWS>(); left > 0; left--, tile--) visit(ring, tile, low, high);
    finish(row);
  }

 private:
  DEVICE void arrive(Barrier barrier) { arrive_as_warp(barrier, lane); }
  // Rows are gathered from all query heads of the group; columns beyond the head dim are 0.
  DEVICE void load_q() {
    const int thread = warp * WARP + lane;
#pragma unroll 4
    for (int i = thread; i < C::PANELS * 64 * 8; i += WARPGROUP) {
      const int panel = i / (64 * 8), row = (i / 8) % 64, chunk = i % 8, column = panel * 64 + chunk * 8;
      store_shared_i32x4(shared + C::Q + panel * C::PANEL + row * PANEL_ROW + ((chunk ^ (row & 7)) * 16),
                         load_query(p, unit, unit.first_row + row, column));
    }
    fence_async_shared();
    named_barrier_sync<OWN_THREADS>(WARPGROUP);
  }

  DEVICE void visit(Ring<C>& ring, int tile, const KeyRange& low, const KeyRange& high) {
    const int start = tile * C::KV_ROWS;
    ring.full().wait(ring.phase);
    multiply_s(ring.slot);
    wgmma_wait<0>();
    pin(s);
    arrive(ring.empty());
    ring.next();
    if constexpr (SOFTCAP) cap_scores(s, p.cap_scale);
    if (start < unit.lowest_full || start + C::KV_ROWS > unit.end_full) mask_scores(low, high, start);
    float rescale[2];
    softmax(rescale);
#pragma unroll
    for (int i = 0; i < C::OUTPUTS; i++) out[i] *= rescale[(i >> 1) & 1];
#pragma unroll
    for (int i = 0; i < C::SCORES / 2; i++) probability[i] = pack<Half>(s[2 * i], s[2 * i + 1]);
    ring.full().wait(ring.phase);
    if (start < unit.low || start + C::KV_ROWS > unit.high) clear_values(ring.address(), start);
    multiply_out(ring.slot);
    wgmma_wait<0>();
    pin(out);
    arrive(ring.empty());
    ring.next();
  }
  // Values of keys that nobody attends: a slot may hold anything, and a weight of 0 does not make a NaN 0.
  DEVICE void clear_values(u32 values, int start) {
    const int first = unit.low - start, end = unit.high - start, thread = warp * WARP + lane;
#pragma unroll 1
    for (int i = thread; i < C::PANELS * C::KV_ROWS * 8; i += WARPGROUP) {
      const int row = (i / 8) % C::KV_ROWS;
      if (row < first || row >= end) store_shared_i32x4(values + i * 16, make_int4(0, 0, 0, 0));
    }
    fence_async_shared();
    named_barrier_sync<OWN_THREADS>(WARPGROUP);
  }

  DEVICE void multiply_s(u32 slot) {  // S = Q K^T
    const u32 a = opaque(base), b = opaque(base) + slot * (C::KV_BYTES / DESCRIPTOR_UNIT);
    multiply<Half, D>(s, RowsOf{a, C::Q, C::PANEL}, RowsOf{b, C::RING, C::KV_PANEL});
  }
  DEVICE void multiply_out(u32 slot) {  // O += P V
    multiply_add<Half>(out, probability, ColumnsOf{opaque(base) + slot * (C::KV_BYTES / DESCRIPTOR_UNIT), C::RING, C::KV_PANEL});
  }

  // Register 4 g + e of a score tile is row + 8 (e / 2), key column 8 g + 2 (lane % 4) + e % 2.
  DEVICE void mask_scores(const KeyRange& low, const KeyRange& high, int start) {
    const int key = start + 2 * (lane & 3);
#pragma unroll
    for (int i = 0; i < C::SCORES; i++) {
      const KeyRange& row = (i & 2) ? high : low;
      const int at = key + 8 * (i / 4) + (i & 1);
      if (at < row.first || at >= row.end) s[i] = MINUS_INFINITY;
    }
  }
  DEVICE void softmax(float (&rescale)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float part[LANES];
      const float largest = fmaxf(row_max[r], tile_max(s, r));
      const float shift = shift_of(largest, p.scale_log2);
      weigh(s, r, p.scale_log2, shift, part);
      rescale[r] = rescale_of(row_max[r], p.scale_log2, shift);
      row_max[r] = largest;
      row_sum[r] = add_to_sum(row_sum[r], rescale[r], part);
    }
  }
  DEVICE void finish(int first_row) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const RowPlace row(p, unit, first_row + 8 * r);
      const RowEnd end(p, row, row_max[r], row_sum[r]);
      if (!row.exists) continue;
      if ((lane & 3) == 0) p.lse[row.lse_at(p, unit)] = end.lse;
#pragma unroll
      for (int g = 0; g < D / 8; g++)
        store_pair<Half>(p, unit, row, 8 * g + 2 * (lane & 3), out[4 * g + 2 * r] * end.factor, out[4 * g + 2 * r + 1] * end.factor);
    }
  }
};
