// The warpgroup that owns 16 columns of the output: it goes through the messages of all tiles, in order.
#pragma once
#include "common/wgmma.cuh"
#include "decode/cluster_config.cuh"

template <typename Half, int D> struct ClusterOutputs {
  using C = ClusterConfig<D>;
  static constexpr int OWN_THREADS = 2;  // a barrier of the warpgroup
  const DecodeParams& p;
  const Unit& unit;
  u32 shared, base;
  int rank, warp, lane;
  Mail<C> mail;
  float out[C::OUTPUTS];

  DEVICE ClusterOutputs(const DecodeParams& params, const Unit& of_cluster, u32 shared_base, int rank_of_cta, int warp_of_group,
                        int lane_of_warp)
      : p(params), unit(of_cluster), shared(shared_base), base(shared_base >> 4), rank(rank_of_cta), warp(warp_of_group),
        lane(lane_of_warp), mail{shared_base} {}

  DEVICE void run() {
    const Rounds<C> rounds(unit);
    Ring<typename C::VRing> ring{shared};
#pragma unroll
    for (int i = 0; i < C::OUTPUTS; i++) out[i] = 0.f;
    float highest = MINUS_INFINITY, sum = 0.f;
#pragma unroll 1
    for (int visit = 0; visit < rounds.visits; visit++) {
      const u32 message = mail.message(visit), start = rounds.first_key(visit);
      mbarrier_wait(mail.message_full(visit), visit / C::MESSAGES & 1);
      if (warp == 0 && lane == 0) mail.expect_message(rounds, visit + C::MESSAGES);
      const float rescale = load(message + C::RESCALE + (lane >> 2) * 4);
      highest = load(message + C::HIGHEST + (lane >> 2) * 4);
      float part[C::LANES];
#pragma unroll
      for (int i = 0; i < C::LANES; i++) part[i] = load(message + C::PARTS + (i * C::ROWS * 4 + lane) * 4);
      sum = add_to_sum(sum, rescale, part);
#pragma unroll
      for (int i = 0; i < C::OUTPUTS; i++) out[i] *= rescale;
      ring.full().wait(ring.phase);
      if ((int)start < unit.low || (int)start + C::KV_ROWS > unit.high) clear_values(ring.address(), start);
      multiply(message, ring.slot);
      wgmma_wait<0>();
      pin(out);
      __syncwarp();
      if (lane == 0) {
        ring.empty().arrive();
        if (visit % C::CTAS == C::CTAS - 1 || visit == rounds.visits - 1) mail.round_read(visit / C::CTAS).arrive();
      }
      ring.next();
    }
    finish(highest, sum);
  }

 private:
  static DEVICE float load(u32 address) { return __int_as_float(load_shared_i32(address)); }
  // As in DecodeConsumer: a weight of 0 does not make a NaN 0.
  DEVICE void clear_values(u32 values, int start) {
    const int first = unit.low - start, end = unit.high - start;
#pragma unroll 1
    for (int i = warp * WARP + lane; i < C::KV_ROWS * 2; i += WARPGROUP)
      if (i / 2 < first || i / 2 >= end) store_shared_i32x4(values + i * 16, make_int4(0, 0, 0, 0));
    fence_async_shared();
    named_barrier_sync<OWN_THREADS>(WARPGROUP);
  }
  DEVICE void multiply(u32 message, u32 slot) {  // O += P V
    const u32 a = opaque(message >> 4), b = opaque(base) + slot * (C::V_BYTES / DESCRIPTOR_UNIT);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::KV_ROWS / 16; k++)
      wgmma_ss<Half, 0, 1>(true, out, descriptor_of(ALL_GROUPS_ALIKE, a + descriptor_low((k / 4) * C::GROUP + (k % 4) * SIXTEEN_COLUMNS)),
                           descriptor_of(NARROW_ROWS, b + descriptor_low(C::V + k * 16 * C::V_ROW)));
    wgmma_commit();
  }
  DEVICE void finish(float highest, float sum) {
    if (warp != 0) return;  // its rows are the same
    const RowPlace row(p, unit, unit.first_row + (lane >> 2));
    const RowEnd end(p, row, highest, sum);
    if (!row.exists) return;
    if (rank == 0 && (lane & 3) == 0) p.lse[row.lse_at(p, unit)] = end.lse;
#pragma unroll
    for (int g = 0; g < 2; g++)
      store_pair<Half>(p, unit, row, rank * C::COLUMNS + 8 * g + 2 * (lane & 3), out[4 * g] * end.factor, out[4 * g + 1] * end.factor);
  }
};

// One warp: tells the senders of a round that this CTA has read it. An arrive in another CTA waits for all memory operations before it,
// which would hold up the warpgroup of the outputs.
template <int D> struct ClusterReceipts {
  using C = ClusterConfig<D>;
  const Unit& unit;
  Mail<C> mail;
  int lane;

  DEVICE void run() {
    const Rounds<C> rounds(unit);
#pragma unroll 1
    for (int round = 0; rounds.tiles_of(round) > 0; round++) {
      mail.round_read(round).wait((round >> 1) & 1);
      if (lane < rounds.tiles_of(round)) arrive_in_cta(in_cta(mail.draft_read(round), lane));
    }
  }
};
