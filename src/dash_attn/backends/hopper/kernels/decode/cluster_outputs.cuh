// The warpgroup that owns some columns of the output: it goes through the messages of all tiles, in order.
#pragma once
#include "common/wgmma.cuh"
#include "decode/cluster_config.cuh"

template <typename Half, typename C> struct ClusterOutputs {
  static constexpr int OWN_THREADS = 2;  // a barrier of the warpgroup
  const DecodeParams& p;
  const Unit& unit;
  u32 shared, base;
  int rank, warp, lane;
  Mail<C> mail;
  float out[C::OUTPUTS];

  DEVICE ClusterOutputs(const DecodeParams& params, const Unit& of_cluster, u32 shared_base, int rank_of_cta, int warp_of_group,
                        int lane_of_warp)
      : p(params), unit(of_cluster), shared(shared_base), base(matrix_address(shared_base)), rank(rank_of_cta), warp(warp_of_group),
        lane(lane_of_warp), mail{shared_base} {}

  DEVICE void run() {
    const Rounds<C> rounds(unit);
    Ring<typename C::VRing> ring{shared};
    Ring<typename C::MessageRing> messages{shared};
    Turn<C::ROUNDS> turn;
#pragma unroll
    for (int i = 0; i < C::OUTPUTS; i++) out[i] = 0.f;
    float highest = MINUS_INFINITY, sum = 0.f;
    u32 slot_before = 0;
    int tiles = 0;  // of this round that were read
#pragma unroll 1
    for (int visit = 0; visit < rounds.visits; visit++) {
      const u32 message = messages.address();
      float rescale = 1.f;
      STAMP(0, visit, 0)
      if (!(ABLATE & 1)) {
        messages.full().wait(messages.phase);
        STAMP(0, visit, 1)
        if (warp == 0 && lane == 0 && visit + C::MESSAGES < rounds.visits) messages.full().arrive_expect(C::MESSAGE_BYTES);
        rescale = load(message + C::RESCALE + (lane >> 2) * 4);
        highest = load(message + C::HIGHEST + (lane >> 2) * 4);
        float part[C::LANES];
#pragma unroll
        for (int i = 0; i < C::LANES; i++) part[i] = load(message + C::PARTS + (i * C::ROWS * 4 + lane) * 4);
        sum = add_to_sum(sum, rescale, part);
      }
      if (!(ABLATE & 2)) ring.full().wait(ring.phase);
      STAMP(0, visit, 2)
      const int start = rounds.first_key(visit);
      if (start < unit.low || start + C::KV_ROWS > unit.high) clear_values(ring.address(), start);
      wgmma_wait<0>();  // the tile before
      pin(out);
      STAMP(0, visit, 3)
      scale(message, rescale);
      if (!(ABLATE & 8)) multiply(message, ring.slot);
      STAMP(0, visit, 4)
      if (visit > 0) release(slot_before, tiles, turn);
      slot_before = ring.slot;
      ring.next();
      messages.next();
    }
    wgmma_wait<0>();
    pin(out);
    if (rounds.visits > 0) tiles = C::CTAS - 1, release(slot_before, tiles, turn);
    finish(highest, sum);
  }

 private:
  DEVICE void release(u32 slot, int& tiles, Turn<C::ROUNDS>& turn) {
    __syncwarp();
    if (lane == 0) Barrier{shared + C::VRing::EMPTY + 8 * slot}.arrive();
    if (++tiles < C::CTAS) return;
    if (lane == 0) mail.round_read(turn.slot).arrive();
    turn.next();
    tiles = 0;
  }
  static DEVICE float load(u32 address) { return __int_as_float(load_shared_i32(address)); }
  // As in DecodeConsumer: a weight of 0 does not make a NaN 0.
  DEVICE void clear_values(u32 values, int start) {
    const int first = unit.low - start, end = unit.high - start;
#pragma unroll 1
    for (int i = warp * WARP + lane; i < C::V_BYTES / 16; i += WARPGROUP)
      if (i / (C::V_ROW / 16) < first || i / (C::V_ROW / 16) >= end) store_shared_i32x4(values + i * 16, make_int4(0, 0, 0, 0));
    fence_async_shared();
    named_barrier_sync<OWN_THREADS>(WARPGROUP);
  }
  DEVICE void multiply(u32 message, u32 slot) {  // O += P V
    const u32 a = opaque(matrix_address(message)), b = opaque(base) + slot * (C::V_BYTES / DESCRIPTOR_UNIT);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::KV_ROWS / 16; k++)
      if constexpr (V_FIRST)
        wgmma_ss<Half, 1, 0>(true, out, descriptor_of(NARROW_ROWS<C::COLUMNS>, b + descriptor_low(C::V + k * 16 * C::V_ROW, 0)),
                             descriptor_of(WEIGHTS_ALIKE, a + descriptor_low(k * 2 * C::P_GROUP, C::P_GROUP)));
      else
      wgmma_ss<Half, 0, 1>(true, out, descriptor_of(WEIGHTS_ALIKE, a + descriptor_low(k * 2 * C::P_GROUP, C::P_GROUP)),
                           descriptor_of(NARROW_ROWS<C::COLUMNS>, b + descriptor_low(C::V + k * 16 * C::V_ROW)));
    wgmma_commit();
  }
  DEVICE void scale(u32 message, float rescale) {
    if constexpr (V_FIRST) {
      const float2 both = load_shared_f32x2(message + C::RESCALE + (lane & 3) * 8);
#pragma unroll
      for (int i = 0; i < 4; i++) out[i] *= i & 1 ? both.y : both.x;
    } else {
#pragma unroll
      for (int i = 0; i < C::OUTPUTS; i++) out[i] *= rescale;
    }
  }
  // A thread has two rows of column lane / 4; the next lane has them of the next column. Each takes one row of both.
  DEVICE void finish_columns(float highest, float sum) {
    if (16 * warp >= C::COLUMNS) return;
    const RowPlace of_sum(p, unit, unit.first_row + (lane >> 2));
    const RowEnd end(p, of_sum, highest, sum);
    if (of_sum.exists && rank == 0 && warp == 0 && (lane & 3) == 0) p.lse[of_sum.lse_at(p, unit)] = end.lse;
    const int odd = (lane >> 2) & 1, mine = 2 * (lane & 3) + odd;
    const float factor = __int_as_float(__shfl_sync(0xffffffffu, __float_as_int(end.factor), 4 * mine));
    const RowPlace row(p, unit, unit.first_row + mine);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const float got = __shfl_xor_sync(0xffffffffu, odd ? out[2 * j] : out[2 * j + 1], 4);
      const float x = odd ? got : out[2 * j], y = odd ? out[2 * j + 1] : got;
      const int column = rank * C::COLUMNS + 16 * warp + 8 * j + (lane >> 2) - odd;
      if (row.exists) store_pair<Half>(p, unit, row, column, x * factor, y * factor);
    }
  }
  DEVICE void finish(float highest, float sum) {
    if constexpr (V_FIRST) return finish_columns(highest, sum);
    if (warp != 0) return;  // its rows are the same
    const RowPlace row(p, unit, unit.first_row + (lane >> 2));
    const RowEnd end(p, row, highest, sum);
    if (!row.exists) return;
    if (rank == 0 && (lane & 3) == 0) p.lse[row.lse_at(p, unit)] = end.lse;
#pragma unroll
    for (int g = 0; g < C::COLUMNS / 8; g++)
      store_pair<Half>(p, unit, row, rank * C::COLUMNS + 8 * g + 2 * (lane & 3), out[4 * g] * end.factor, out[4 * g + 1] * end.factor);
  }
};

// One warp: tells the senders of a round that this CTA has read it. An arrive in another CTA waits for all memory operations before it,
// which would hold up the warpgroup of the outputs.
template <typename C> struct ClusterReceipts {
  const Unit& unit;
  Mail<C> mail;
  int lane;

  DEVICE void run() {
    if (ABLATE & 1) return;
    const Rounds<C> rounds(unit);
    Turn<C::ROUNDS> turn;
#pragma unroll 1
    for (int round = 0; rounds.tiles_of(round) > 0; round++) {
      mail.round_read(turn.slot).wait(turn.phase);
      if (lane < rounds.tiles_of(round)) arrive_in_cta(in_cta(mail.draft_read(turn.slot), lane));
      turn.next();
    }
  }
};
