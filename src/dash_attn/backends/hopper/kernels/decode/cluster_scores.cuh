// The warpgroup that computes scores of this CTA's tiles. Its first warp makes weights of them and sends them to all CTAs.
#pragma once
#include "common/wgmma.cuh"
#include "decode/cluster_config.cuh"

template <typename Half, int D, bool SOFTCAP> struct ClusterScores {
  using C = ClusterConfig<D>;
  static constexpr int OWN_THREADS = 1;  // a barrier of the warpgroup
  const DecodeParams& p;
  const Unit& unit;
  u32 shared, base;
  int rank, warp, lane;
  Mail<C> mail;
  float s[C::SCORES];

  DEVICE ClusterScores(const DecodeParams& params, const Unit& of_cluster, u32 shared_base, int rank_of_cta, int warp_of_group,
                       int lane_of_warp)
      : p(params), unit(of_cluster), shared(shared_base), base(shared_base >> 4), rank(rank_of_cta), warp(warp_of_group),
        lane(lane_of_warp), mail{shared_base} {}

  DEVICE void run() {
    load_q();
    const Rounds<C> rounds(unit);
    const int row = lane >> 2;
    const KeyRange kept(p, (unit.first_row + row) / p.group, unit.q_len, unit.keys);
    Ring<typename C::KRing> ring{shared};
    float highest = MINUS_INFINITY;  // in the tiles of all rounds before
#pragma unroll 1
    for (int round = 0; rank < rounds.tiles_of(round); round++) {
      ring.full().wait(ring.phase);
      multiply(ring.slot);
      wgmma_wait<0>();
      pin(s);
      __syncwarp();
      if (lane == 0) ring.empty().arrive();
      ring.next();
      if (warp != 0) continue;  // its rows are the same
      const int start = rounds.first_key(round * C::CTAS + rank);
      if constexpr (SOFTCAP) cap_scores();
      if (start < unit.lowest_full || start + C::KV_ROWS > unit.end_full) mask_scores(kept, start);
      const float mine = tile_max(s, 0);
      tell_maximum(rounds.tiles_of(round), round, mine);
      mbarrier_wait(mail.maxima_full(round), (round >> 1) & 1);
      if (lane == 0) mail.expect_maxima(rounds, round + 2, rank);
      float before = highest;
      for (int cta = 0; cta < rounds.tiles_of(round); cta++) {
        const float theirs = __int_as_float(load_shared_i32(mail.maxima(round) + (cta * C::ROWS + row) * 4));
        if (cta < rank) before = fmaxf(before, theirs);
        highest = fmaxf(highest, theirs);
      }
      const float largest = fmaxf(before, mine);
      float part[C::LANES];
      const float rescale = weigh(s, 0, before, largest, p.scale_log2, part);
      wait_for_cluster(mail.draft_read(round), ((round >> 1) & 1) ^ 1);
      write(mail.draft(round), rescale, largest, part);
      send(round);
    }
  }

 private:
  DEVICE void load_q() {
    for (int i = warp * WARP + lane; i < C::PANELS * C::ROWS * 8; i += WARPGROUP) {
      const int panel = i / (C::ROWS * 8), row = (i / 8) % C::ROWS, chunk = i % 8;
      store_shared_i32x4(shared + C::Q + panel * C::GROUP + row * PANEL_ROW + ((chunk ^ row) * 16),
                         load_query(p, unit, unit.first_row + row, panel * 64 + chunk * 8));
    }
    fence_async_shared();
    named_barrier_sync<OWN_THREADS>(WARPGROUP);
  }
  DEVICE void multiply(u32 slot) {  // S = Q K^T
    const u32 a = opaque(base), b = opaque(base) + slot * (C::K_BYTES / DESCRIPTOR_UNIT);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < D / 16; k++)
      wgmma_ss<Half, 0, 0>(k > 0, s,
                           descriptor_of(ALL_GROUPS_ALIKE, a + descriptor_low(C::Q + (k / 4) * C::GROUP + (k % 4) * SIXTEEN_COLUMNS)),
                           descriptor(b + descriptor_low(C::K + (k / 4) * C::KV_PANEL + (k % 4) * SIXTEEN_COLUMNS)));
    wgmma_commit();
  }
  DEVICE void cap_scores() {
#pragma unroll
    for (int i = 0; i < C::SCORES; i++) s[i] = tanh_half_log2(s[i] * p.cap_scale);
  }
  DEVICE void mask_scores(const KeyRange& kept, int start) {
#pragma unroll
    for (int i = 0; i < C::SCORES / 2; i++) {
      const int key = start + 2 * (lane & 3) + 8 * (i / 2) + (i & 1);
      if (key < kept.first || key >= kept.end) row_score(s, 0, i) = MINUS_INFINITY;
    }
  }
  DEVICE void tell_maximum(int tiles, int round, float mine) {
    const u32 at = mail.maxima(round) + (rank * C::ROWS + (lane >> 2)) * 4;
    for (int cta = lane & 3; cta < tiles; cta += 4) store_to_cta(in_cta(at, cta), mine, in_cta(mail.maxima_full(round), cta));
  }
  // Weights as the first operand of a product: panels of 64 keys, swizzled.
  DEVICE void write(u32 draft, float rescale, float largest, const float (&part)[C::LANES]) {
    const int row = lane >> 2, quarter = lane & 3;
#pragma unroll
    for (int g = 0; g < C::KV_ROWS / 8; g++)
      store_shared_i32(draft + (g / 8) * C::GROUP + row * PANEL_ROW + (((g % 8) ^ row) * 16) + quarter * 4,
                       (int)pack<Half>(s[4 * g], s[4 * g + 1]));
    if (quarter == 0) {
      store_shared_i32(draft + C::RESCALE + row * 4, __float_as_int(rescale));
      store_shared_i32(draft + C::HIGHEST + row * 4, __float_as_int(largest));
    }
#pragma unroll
    for (int i = 0; i < C::LANES; i++)
      store_shared_i32(draft + C::PARTS + ((i * C::ROWS + row) * 4 + quarter) * 4, __float_as_int(part[i]));
  }
  DEVICE void send(int round) {
    const int visit = round * C::CTAS + rank;
    fence_async_shared();
    __syncwarp();
    if (lane < C::CTAS)
      copy_to_cta(in_cta(mail.message(visit), lane), mail.draft(round), C::MESSAGE_BYTES, in_cta(mail.message_full(visit), lane));
  }
};
