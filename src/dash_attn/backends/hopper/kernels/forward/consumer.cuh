// A warpgroup with 64 queries: S = Q K^T, online softmax, O += P V. While one warpgroup does its softmax, the tensor cores
// work for another (most take turns); inside a warpgroup, P V of one KV tile runs under the softmax of the next.
#pragma once
#include "forward/config.cuh"
#include "common/modifiers.cuh"
#include "common/product.cuh"
#include "common/softmax.cuh"

// The keys a query attends inside partial tiles.
template <MaskKind KIND> struct QueryMask {
  int first, end;  // the interval outside of which none is kept

  DEVICE QueryMask(const MaskParams& mask, int query, int q_len, int kv_len) {
    const bool exists = query < q_len;
    first = 0;
    end = exists ? kv_len : 0;
    if constexpr (is_band(KIND)) {
      const int top = band_top(mask, q_len, kv_len);
      first = query + top - (int)mask.band_width;
      end = min(end, query + top + 1);
    } else if (KIND == MaskKind::Rows && exists) {
      const int2 kept = mask.rows[query];
      first = kept.x;
      end = kept.y;
    }
  }
};

// Whether a block mask keeps a key inside that interval.
template <MaskKind KIND> DEVICE bool is_kept(const MaskParams& mask, int query, int key) {
  if constexpr (KIND != MaskKind::Blocks) return true;
  return mask.blocks[(i64)(query / mask.block_q) * mask.block_columns + key / mask.block_kv] != 0;
}

template <typename V> struct ForwardConsumer {
  using C = typename V::C;
  using Half = typename V::Half;
  static constexpr MaskKind MASK = V::MASK;
  static constexpr bool SOFTCAP = V::SOFTCAP, DROPOUT = V::DROPOUT, ALIBI = V::ALIBI;
  static constexpr int D = C::D, V_DIM = C::V_DIM, CONSUMERS = C::CONSUMERS;
  using Bits = OwnBits<MASK, C::SCORES, CONSUMERS * WARPGROUP>;
  static constexpr int LANES = sum_lanes(D);
  // Where two warpgroups do not fill the tensor cores, one that ends a tile must not hold up the other.
  static constexpr bool TAKE_TURNS = CONSUMERS == 3 || D > 64;
  // With two buffers for weights, a softmax waits for no output. With one, weights would overwrite those that it still reads.
  // Beyond 128, and with dropout, registers are short; up to 96 it does not pay.
  static constexpr int BUFFERS = D > 96 && D <= 128 && !DROPOUT ? 2 : 1;
  // Beyond 128 the exponentials of a thread's first row hide the search for the maximum of the second.
  static constexpr bool ROW_BY_ROW = V_DIM > 128;
  // Whether the descriptors of Q stay in uniform registers during a tile. With two buffers it does not pay, elsewhere others would spill.
  static constexpr bool HOLD_Q = BUFFERS == 1 && (D <= 192 || (!DROPOUT && MASK != MaskKind::Blocks));
  const ForwardParams& p;
  const ModifierParams* m;  // of dropout and ALiBi
  u32 shared, base;
  ForwardBarrierHandles bars;
  int wg, warp, lane;  // warp inside the warpgroup
  float s[C::SCORES], out[C::OUTPUTS];
  u32 weights[BUFFERS][C::SCORES / 2];  // P in 16 bits
  bool k_is_there;               // that of the next visit, found out early (two buffers)
  float row_max[2], row_sum[2];  // rows lane / 4 and lane / 4 + 8 of the warp; the sum over this thread's columns only

  DEVICE ForwardConsumer(const ForwardRole& role, int warp_of_block, int lane_of_warp)
      : p(role.p), m(role.m), shared(role.shared), base(shared >> 4), bars(role.bars), wg(warp_of_block / 4 - 1), warp(warp_of_block & 3),
        lane(lane_of_warp) {}

  DEVICE void run() {
    u32 loads = 0;
    if (wg == CONSUMERS - 1) pass_turn();  // the first turn is warpgroup 0's
    for (u32 tiles = 0;; tiles++) {
      const u32 slot = tiles & 1, phase = (tiles >> 1) & 1;
      bars.tile_full(slot).wait(phase);
      const TileNote tile = note_of_tile<C>(shared, slot);
      if (tile.visits < 0) break;
#pragma unroll
      for (int i = 0; i < C::OUTPUTS; i++) out[i] = 0.f;
      row_max[0] = row_max[1] = MINUS_INFINITY;
      row_sum[0] = row_sum[1] = 0.f;
      const u32 q_stage = C::Q_STAGES == 2 ? slot : 0;
      bars.q_full(q_stage).wait(C::Q_STAGES == 2 ? phase : tiles & 1);
      if (tile.visits > 0)
        visit(tile, q_stage, loads, slot);
      else if (!C::OUT_OVER_Q)
        arrive(bars.q_empty(q_stage));
      loads += tile.visits;
      float factor[2];
      finish_rows(slot, factor);  // under the last product
      await_room();
      take_output((loads - 1) & 1, tile.visits > 0);
      write_output(factor);
    }
  }

 private:
  DEVICE void arrive(Barrier barrier) { arrive_as_warp(barrier, lane); }
  DEVICE void await_turn() {
    if constexpr (TAKE_TURNS) named_barrier_sync(TURN + wg, 2 * WARPGROUP);
  }
  DEVICE void pass_turn(bool now = true) {
    if (TAKE_TURNS && now) named_barrier_arrive(TURN + (wg == CONSUMERS - 1 ? 0 : wg + 1), 2 * WARPGROUP);
  }
  DEVICE int query_of(const TileNote& tile) { return tile.query + wg * 64 + warp * 16 + (lane >> 2); }

  // This thread's two rows of queries.
  struct Rows {
    int query;
    QueryMask<MASK> low, high;
    u32 slot;  // of the tile's notes
  };

  DEVICE void visit(const TileNote& tile, u32 q_stage, u32 load, u32 slot) {
    const u32 first = load, last = load + tile.visits - 1;
    float rescale[2];
    const u32 queries = HOLD_Q ? place_of_queries(q_stage) : q_stage;
    await_k(load);
    const VisitNote note = note_of(load & 1);
    const Bits bits = bits_of(note);
    await_turn();
    multiply_s(queries, load & 1);
    if constexpr (BUFFERS == 1) pass_turn();
    const int query = query_of(tile);
    const Rows rows{query, {p.mask, query, tile.q_len, tile.kv_len}, {p.mask, query + 8, tile.q_len, tile.kv_len}, slot};
    wgmma_wait<0>();
    take_scores(rows, note, bits, load & 1);
    weigh_scores<false>(rescale, [&] {
      if constexpr (BUFFERS == 2) k_is_there = is_k_there(load + 1);
    });
    pack_weights<0>(rows, note);
    rescale[0] = rescale[1] = 1.f;  // there is no output yet
    if (BUFFERS == 1 && load < last) await_k(load + 1);
#pragma unroll 1
    while (load < last) {
      visit_next<0>(rows, queries, load, load > first, last, rescale);
      load++;
      if constexpr (BUFFERS == 2) {
        if (load == last) break;
        visit_next<1>(rows, queries, load, true, last, rescale);
        load++;
      }
    }
    if constexpr (!C::OUT_OVER_Q) arrive(bars.q_empty(q_stage));
    bars.v_full(load & 1).wait((load >> 1) & 1);
    if constexpr (BUFFERS == 2) {
      take_output((load & 1) ^ 1, load > first);
      rescale_output(rescale);
    }
    if (BUFFERS == 1 || (tile.visits & 1))
      multiply_out<0>(load & 1);
    else
      multiply_out<BUFFERS - 1>(load & 1);
  }

  // S of the next KV tile, then O += P V of this one, whose weights are in buffer B. The softmax of the next one runs under the latter.
  // Little may stand between the wait for K and the products: the tensor cores may be idle then.
  template <int B> DEVICE void visit_next(const Rows& rows, u32 queries, u32 load, bool is_under_way, u32 last, float (&rescale)[2]) {
    const u32 now = load & 1, next = now ^ 1;
    if (BUFFERS == 2 && !k_is_there) await_k(load + 1);
    const VisitNote note = note_of(next);
    const Bits bits = bits_of(note);
    if constexpr (BUFFERS == 2) take_output(next, is_under_way);
    await_turn();
    multiply_s(queries, next);
    bars.v_full(now).wait((load >> 1) & 1);
    if constexpr (BUFFERS == 2) rescale_output(rescale);
    multiply_out<B>(now);
    if constexpr (BUFFERS == 1) pass_turn();
    wgmma_wait<1>();  // S
    take_scores(rows, note, bits, next);
    weigh_scores<BUFFERS == 1>(rescale, [&] {
      if constexpr (BUFFERS == 2) {
        k_is_there = is_k_there(load + 2);
      } else {
        if (load + 1 < last) await_k(load + 2);
        take_output(now, true);
      }
    });
    pack_weights<(B + 1) % BUFFERS>(rows, note);
  }
  DEVICE void await_k(u32 load) { bars.k_full(load & 1).wait((load >> 1) & 1); }
  DEVICE bool is_k_there(u32 load) { return bars.k_full(load & 1).is_over((load >> 1) & 1); }
  // Waits for the output under way, if there is one, and gives back its V. ptxas moves such a wait up to the last branch before it. That
  // is the wait for K: with two buffers it stands behind the softmax, with one behind its maxima.
  DEVICE void take_output(u32 stage, bool is_under_way) {
    wgmma_wait<0>();
    pin(out);
    if (is_under_way) arrive(bars.v_empty(stage));
  }
  DEVICE void rescale_output(const float (&rescale)[2]) {
    // Often it would change nothing. With one buffer, multiplications fill the gaps between the exponentials.
    if (BUFFERS == 2 && !__any_sync(0xffffffffu, rescale[0] != 1.f || rescale[1] != 1.f)) return;
#pragma unroll
    for (int i = 0; i < C::OUTPUTS; i++) out[i] *= rescale[(i >> 1) & 1];
  }
  DEVICE void rescale_row(int r, float rescale) {
#pragma unroll
    for (int i = 0; i < C::OUTPUTS; i++)
      if (((i >> 1) & 1) == r) out[i] *= rescale;
  }
  DEVICE void take_scores(const Rows& rows, VisitNote note, const Bits& bits, u32 stage) {
    pin(s);
    arrive(bars.k_empty(stage));
    if constexpr (SOFTCAP) cap_scores(s, p.cap_scale);
    if constexpr (ALIBI) modifiers_of(rows, note.kv_tile()).take_off_distances(s);
    if constexpr (MASK == MaskKind::Bits)
      bits.apply(s, MINUS_INFINITY);
    else if (note.partial())
      mask_scores(rows, note.kv_tile());
  }
  DEVICE Bits bits_of(VisitNote note) { return {p.mask, note.word, (u32)(wg * WARPGROUP + warp * WARP + lane)}; }

  DEVICE VisitNote note_of(u32 stage) { return {load_shared_i32(shared + C::VISIT_NOTES + 4 * stage)}; }

  DEVICE u32 place_of_queries(u32 q_stage) {
    return opaque(base) + q_stage * (C::Q_BYTES / DESCRIPTOR_UNIT) + wg * (C::HALF_BYTES / DESCRIPTOR_UNIT);
  }
  DEVICE void multiply_s(u32 queries, u32 stage) {  // S = Q K^T; queries: their place, or their stage
    if constexpr (!HOLD_Q) queries = place_of_queries(queries);
    const u32 keys = opaque(base) + stage * (C::K_BYTES / DESCRIPTOR_UNIT);
    multiply<Half, D>(s, RowsOf{queries, C::Q, C::PANEL}, RowsOf{keys, C::K, C::KV_PANEL});
  }
  template <int B> DEVICE void multiply_out(u32 stage) {  // O += P V
    multiply_add<Half>(out, weights[B], ColumnsOf{opaque(base) + stage * (C::V_BYTES / DESCRIPTOR_UNIT), C::V, C::KV_PANEL});
  }

  // Register 4 g + e of a score tile is query row + 8 (e / 2), key column 8 g + 2 (lane % 4) + e % 2.
  DEVICE void mask_scores(const Rows& rows, int kv_tile) {
    const int key = kv_tile * C::KV_ROWS + 2 * (lane & 3);  // of column 0
    const int first[2] = {rows.low.first - key, rows.high.first - key}, end[2] = {rows.low.end - key, rows.high.end - key};
    if (MASK != MaskKind::Blocks && __all_sync(0xffffffffu, first[0] <= 0 && first[1] <= 0)) {  // as under causal masks: half the work
#pragma unroll
      for (int i = 0; i < C::SCORES; i++)
        if (end[(i >> 1) & 1] <= 8 * (i / 4) + (i & 1)) s[i] = MINUS_INFINITY;
      return;
    }
#pragma unroll
    for (int i = 0; i < C::SCORES; i++) {
      const int r = (i >> 1) & 1, column = 8 * (i / 4) + (i & 1);
      const bool is_outside = column < first[r] || column >= end[r];
      if (is_outside || !is_kept<MASK>(p.mask, rows.query + 8 * r, key + column)) s[i] = MINUS_INFINITY;
    }
  }
  DEVICE ForwardModifiers modifiers_of(const Rows& rows, int kv_tile) {
    return {load_shared_i32x4(shared + C::SHARED_BYTES + rows.slot * MODIFIER_NOTE_BYTES), rows.query, kv_tile * C::KV_ROWS, lane};
  }
  // P = exp2((S - max) scale), still in 32 bits. `rescale` is what the output so far must be multiplied by. `meanwhile` comes once maxima
  // are known; with one buffer it brings that output.
  template <bool HAS_OUTPUT, typename Meanwhile> DEVICE void weigh_scores(float (&rescale)[2], const Meanwhile& meanwhile) {
    float shift[2];
    if constexpr (!ROW_BY_ROW) {
      float largest[2];
      find_by_bits<BUFFERS == 2>(largest);
#pragma unroll
      for (int r = 0; r < 2; r++) rise_to(largest[r], r, rescale[r], shift[r]);
      meanwhile();
      if constexpr (HAS_OUTPUT) rescale_output(rescale);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      if constexpr (ROW_BY_ROW) {
        rise_to(largest_score(r), r, rescale[r], shift[r]);
        if (r == 0) meanwhile();
        if constexpr (HAS_OUTPUT) rescale_row(r, rescale[r]);
      }
      float part[LANES];
      weigh(s, r, p.scale_log2, shift[r], part);
      row_sum[r] = add_to_sum(row_sum[r], rescale[r], part);
    }
  }
  // `shift` is what scores are reduced by.
  DEVICE void rise_to(float largest, int r, float& rescale, float& shift) {
    shift = shift_of(largest, p.scale_log2);
    rescale = rescale_of(row_max[r], p.scale_log2, shift);  // just 1 if the maximum stays: extra visits change nothing
    row_max[r] = largest;
  }
  // Of a row so far, with this tile.
  DEVICE float largest_score(int r) {
    float most[4];
#pragma unroll
    for (int i = 0; i < 4; i++) most[i] = row_score(s, r, i);
#pragma unroll
    for (int i = 4; i < C::SCORES / 2; i++) most[i % 4] = fmaxf(most[i % 4], row_score(s, r, i));
    float largest = fmaxf(row_max[r], fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3])));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    return fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
  }
  // The same by integers, of which the machine compares three at once. Floats have the order of their bits; negative ones the opposite one.
  template <bool PASS> DEVICE void find_by_bits(float (&largest)[2]) {
    int most[2] = {of_thread<true>(0), of_thread<true>(1)};
    // Whether a row may have met negative scores only: asked of threads, before they know their rows, so that the answer costs no time.
    const bool is_negative = __any_sync(0xffffffffu, (most[0] | most[1]) < 0);
    // ptxas moves an arrive freely, but not in front of what decides whether there is one. No arithmetic makes a NaN like this.
    if constexpr (PASS) pass_turn(most[0] != 0x7fa5a5a5);
#pragma unroll
    for (int r = 0; r < 2; r++) most[r] = of_row<true>(most[r]);
    if (is_negative) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int least = of_row<false>(of_thread<false>(r));
        if (most[r] < 0) most[r] = least;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) largest[r] = __int_as_float(most[r]);
  }
  template <bool MAX> DEVICE int of_thread(int r) {
    const int before = __float_as_int(row_max[r]);
    int most[2] = {before, before};
#pragma unroll
    for (int i = 0; i < C::SCORES / 2; i += 2) {
      const int x = __float_as_int(row_score(s, r, i)), y = __float_as_int(row_score(s, r, i + 1));
      most[i / 2 % 2] = MAX ? __vimax3_s32(most[i / 2 % 2], x, y) : __vimin3_s32(most[i / 2 % 2], x, y);
    }
    return MAX ? max(most[0], most[1]) : min(most[0], most[1]);
  }
  template <bool MAX> DEVICE int of_row(int most) {
#pragma unroll
    for (int apart = 1; apart < 4; apart *= 2) {
      const int other = __shfl_xor_sync(0xffffffffu, most, apart);
      most = MAX ? max(most, other) : min(most, other);
    }
    return most;
  }
  // In 16 bits in buffer B.
  template <int B> DEVICE void pack_weights(const Rows& rows, VisitNote note) {
    if constexpr (DROPOUT) modifiers_of(rows, note.kv_tile()).drop(s, m->threshold);  // behind the sum, which has all weights
#pragma unroll
    for (int i = 0; i < C::SCORES / 2; i++) weights[B][i] = pack<Half>(s[2 * i], s[2 * i + 1]);
  }

  // Writes LSE. Returns what outputs must be multiplied by.
  DEVICE void finish_rows(u32 slot, float (&factor)[2]) {
    const TileNote tile = note_of_tile<C>(shared, slot);
    const int query = query_of(tile);
    arrive(bars.tile_empty(slot));
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float sum = row_sum[r], top = __fmul_rn(row_max[r], p.scale_log2), shrink = 1.f;
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (p.sinks != nullptr) {
        const float sink = __fmul_rn(p.sinks[tile.q_head], LOG2_E), higher = fmaxf(top, sink);
        if (higher != MINUS_INFINITY) {
          shrink = exp2_approx(top - higher);
          sum = fmaf(sum, shrink, exp2_approx(sink - higher));
          top = higher;
        }
      }
      factor[r] = sum == 0.f ? 0.f : shrink / sum;  // a query that attends nothing has output 0 and LSE -inf; NaN stays NaN
      if constexpr (DROPOUT) factor[r] *= m->rescale;
      float lse = sum == 0.f ? MINUS_INFINITY : (top + __log2f(sum)) * LN_2;
      if (p.sinks != nullptr && row_max[r] == MINUS_INFINITY && row_sum[r] == 0.f) lse = p.sinks[tile.q_head];  // just the sink, unrounded
      const int at = query + 8 * r;
      if ((lane & 3) == 0 && at < tile.q_len) p.lse[tile.lse_at + at] = lse;
    }
  }
  DEVICE void write_output(const float (&factor)[2]) {
    const u32 half = shared + C::OUT + wg * C::OUT_HALF;
#pragma unroll
    for (int g = 0; g < V_DIM / 16; g++) {
      u32 r[4];
#pragma unroll
      for (int i = 0; i < 4; i++) r[i] = pack<Half>(out[8 * g + 2 * i] * factor[i & 1], out[8 * g + 2 * i + 1] * factor[i & 1]);
      const int row = warp * 16 + (lane & 15), chunk = (2 * (g % 4) + (lane >> 4)) ^ (lane & 7);
      stmatrix(half + (g / 4) * C::PANEL + row * PANEL_ROW + chunk * 16, r);
    }
    fence_async_shared();
    named_barrier_arrive(OUTPUT + wg, WARPGROUP + WARP);
  }
  DEVICE void await_room() {  // until the output of the tile before has left its memory
    if constexpr (!C::OUT_OVER_Q) named_barrier_sync(ROOM + wg, WARPGROUP + WARP);
  }
};
