// The warpgroup that computes scores of this CTA's tiles, makes weights of them and sends them to all CTAs.
//
// K is the first operand, so that a product has 8 columns instead of 128, and scores are spread over all warps: a thread has those of two
// rows, 2 (lane % 4) and the next, for the keys 16 warp + lane / 4 + 8 j + 64 half. The order of a row sum is the forward's nevertheless:
// the first warp gets the weights through shared memory and adds them as a warp of the forward would.
#pragma once
#include "common/product.cuh"
#include "decode/cluster_config.cuh"

template <typename Half, typename C, bool SOFTCAP, int GROUP> struct ClusterScores : ClusterRole {
  static constexpr int D = C::D, HALVES = C::KV_ROWS / 64;  // of a tile's keys, 64 each
  Mail<C> mail{shared};
  float s[HALVES][4];
  float highest[2];  // in the tiles of all rounds before, of the CTA whose maxima this thread looks at

  DEVICE ClusterScores(const ClusterRole& role) : ClusterRole(role) {}
  DEVICE void run() {
    load_q();
    const Rounds<C> rounds(unit);
    const int row = unit.first_row + 2 * (lane & 3);
    const KeyRange kept[2] = {{p, row / p.group, unit.q_len, unit.keys}, {p, (row + 1) / p.group, unit.q_len, unit.keys}};
    Ring<typename C::KRing> ring{shared, GROUP};
    Ring<typename C::DraftRing> drafts{shared, GROUP};
    highest[0] = highest[1] = MINUS_INFINITY;
#pragma unroll 1
    for (int round = GROUP; place < rounds.tiles_of(round); round += C::GROUPS) {
      ring.full().wait(ring.phase);
      multiply(ring.slot);
      wgmma_wait<0>();
#pragma unroll
      for (int half = 0; half < HALVES; half++) pin(s[half]);
      arrive_as_warp(ring.empty(), lane);
#pragma unroll
      for (int i = 0; i < C::GROUPS; i++) ring.next();
      const int start = rounds.first_key(round * C::CTAS + place);
      if constexpr (SOFTCAP)
        for (int half = 0; half < HALVES; half++) cap_scores(s[half], p.cap_scale);
      if (start < unit.lowest_full || start + C::KV_ROWS > unit.end_full) mask_scores(kept, start);
      const int tiles = rounds.tiles_of(round);
      tell_maxima(tiles, round);
      if (C::GROUPS > 1 && round > 0) mail.await_maxima(round - 1);
      mail.await_maxima(round);
      if (warp == 0 && lane == 0) mail.expect_maxima(rounds, round + C::TOLD, place);
      float before[2], largest[2], rescale[2];
      look_at_maxima(tiles, round, before, largest);
#pragma unroll
      for (int e = 0; e < 2; e++) rescale[e] = weigh(e, before[e], largest[e]);
      wait_for_cluster(drafts.empty().address, drafts.phase ^ 1);
      write(drafts.address(), round > GROUP, rescale, largest);
      if (warp == 0) {
        add(drafts.address());
        send(drafts.slot, drafts.address());
      }
#pragma unroll
      for (int i = 0; i < C::GROUPS; i++) drafts.next();
    }
    if (warp != 0 && place < rounds.tiles_of(GROUP)) named_barrier_sync<READ + GROUP>(WARPGROUP);  // so that all arrivals are awaited
  }

 private:
  DEVICE void load_q() {
    for (int i = (4 * GROUP + warp) * WARP + lane; i < C::PANELS * C::ROWS * 8; i += C::GROUPS * WARPGROUP) {
      const int panel = i / (C::ROWS * 8), row = (i / 8) % C::ROWS, chunk = i % 8;
      store_shared_i32x4(shared + C::Q + panel * C::GROUP + row * PANEL_ROW + ((chunk ^ row) * 16),
                         load_query(p, unit, unit.first_row + row, panel * 64 + chunk * 8));
    }
    fence_async_shared();
    named_barrier_sync<QUERIES>(C::GROUPS * WARPGROUP);
  }
  DEVICE void multiply(u32 slot) {  // S^T = K Q^T
    const u32 a = opaque(base) + slot * (C::K_BYTES / DESCRIPTOR_UNIT), b = opaque(base);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < D / 16; k++)
#pragma unroll
      for (int half = 0; half < HALVES; half++)
        wgmma_ss<Half, 0, 0>(k > 0, s[half], RowsOf{a, C::K + half * 64 * PANEL_ROW, C::KV_PANEL}[k], RowsOf{b, C::Q, C::GROUP}[k]);
    wgmma_commit();
  }
  DEVICE void mask_scores(const KeyRange (&kept)[2], int start) {
#pragma unroll
    for (int half = 0; half < HALVES; half++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int key = start + 64 * half + 16 * warp + (lane >> 2) + 8 * (i >> 1);
        if (key < kept[i & 1].first || key >= kept[i & 1].end) s[half][i] = MINUS_INFINITY;
      }
  }
  DEVICE void tell_maxima(int tiles, int round) {
    const int cta = lane >> 2;
#pragma unroll
    for (int e = 0; e < 2; e++) {
      float largest = s[0][e];
#pragma unroll
      for (int i = 1; i < 2 * HALVES; i++) largest = fmaxf(largest, s[i / 2][2 * (i & 1) + e]);
#pragma unroll
      for (int apart = 4; apart < WARP; apart *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, apart));
      const u32 at = mail.maxima(round) + ((place * C::TELLERS + warp) * C::ROWS + 2 * (lane & 3) + e) * 4;
      if (cta < tiles) store_to_cta(in_cta(at, cta), largest, in_cta(mail.maxima_full(round), cta));
    }
  }
  // Of this thread's rows: before this CTA's tile, and with it. Lanes share the tiles of the round.
  DEVICE void look_at_maxima(int tiles, int round, float (&before)[2], float (&largest)[2]) {
    const int cta = (lane >> 2) % C::CTAS;
    float theirs[2] = {MINUS_INFINITY, MINUS_INFINITY};
    if (C::GROUPS > 1 && round > 0) read_maxima(cta, round - 1, highest);  // of the other warpgroup
    if (cta < tiles) read_maxima(cta, round, theirs);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      before[e] = over_ctas(cta < place ? fmaxf(highest[e], theirs[e]) : highest[e]);
      largest[e] = over_ctas(cta <= place ? fmaxf(highest[e], theirs[e]) : highest[e]);
      highest[e] = fmaxf(highest[e], theirs[e]);
    }
  }
  DEVICE void read_maxima(int cta, int round, float (&so_far)[2]) {
#pragma unroll
    for (int teller = 0; teller < C::TELLERS; teller++) {
      const float2 told = load_shared_f32x2(mail.maxima(round) + ((cta * C::TELLERS + teller) * C::ROWS + 2 * (lane & 3)) * 4);
      so_far[0] = fmaxf(so_far[0], told.x);
      so_far[1] = fmaxf(so_far[1], told.y);
    }
  }
  static DEVICE float over_ctas(float x) {
#pragma unroll
    for (int apart = 4; apart < 4 * C::CTAS; apart *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, apart));
    return x;
  }
  // Scores become weights. Returns what output and sum so far must be multiplied by.
  DEVICE float weigh(int e, float before, float largest) {
    const float shift = shift_of(largest, p.scale_log2);
#pragma unroll
    for (int i = 0; i < 2 * HALVES; i++) {
      float& x = s[i / 2][2 * (i & 1) + e];
      x = weight_of(x, p.scale_log2, shift);
    }
    return rescale_of(before, p.scale_log2, shift);
  }
  // Weights as an operand of a product: groups of 8 keys. Unrounded ones for the first warp.
  DEVICE void write(u32 draft, bool again, const float (&rescale)[2], const float (&largest)[2]) {
    const int group = 2 * warp, row = 2 * (lane & 3);
    static_assert(HALVES == 2, "stmatrix");
    const u32 packed[4] = {pack<Half>(s[0][0], s[0][1]), pack<Half>(s[0][2], s[0][3]), pack<Half>(s[1][0], s[1][1]),
                           pack<Half>(s[1][2], s[1][3])};
    stmatrix_transposed(draft + ((lane >> 4) * 8 + group + ((lane >> 3) & 1)) * C::P_GROUP + (lane & 7) * 16, packed);
    if (warp == 0 && lane < 4) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        store_shared_i32(draft + C::RESCALE + (row + e) * 4, __float_as_int(rescale[e]));
        store_shared_i32(draft + C::HIGHEST + (row + e) * 4, __float_as_int(largest[e]));
      }
    }
    if (warp != 0 && again) named_barrier_sync<READ + GROUP>(WARPGROUP);
#pragma unroll
    for (int half = 0; half < HALVES; half++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        store_shared_i32(weight(row + (i & 1), 64 * half + 16 * warp + 8 * (i >> 1) + (lane >> 2)), __float_as_int(s[half][i]));
    fence_async_shared();
    if (warp == 0)
      named_barrier_sync<WRITTEN + GROUP>(WARPGROUP);
    else
      named_barrier_arrive<WRITTEN + GROUP>(WARPGROUP);
  }
  DEVICE u32 weight(int row, int key) const { return shared + C::WEIGHTS + ((GROUP * C::ROWS + row) * C::WEIGHT_ROW + key) * 4; }
  // Parts of the row sums, as in weigh().
  DEVICE void add(u32 draft) {
    const int row = lane >> 2, quarter = lane & 3;
    float part[C::LANES];
#pragma unroll
    for (int g = 0; g < C::KV_ROWS / 8; g++) {
      const float2 x = load_shared_f32x2(weight(row, 8 * g + 2 * quarter));
      const int i = 2 * g;
      part[i % C::LANES] = i < C::LANES ? x.x : part[i % C::LANES] + x.x;
      part[(i + 1) % C::LANES] = i + 1 < C::LANES ? x.y : part[(i + 1) % C::LANES] + x.y;
    }
    named_barrier_arrive<READ + GROUP>(WARPGROUP);
#pragma unroll
    for (int i = 0; i < C::LANES; i++)
      store_shared_i32(draft + C::PARTS + ((i * C::ROWS + row) * 4 + quarter) * 4, __float_as_int(part[i]));
  }
  DEVICE void send(u32 turn, u32 draft) {
    const u32 slot = turn * C::CTAS + place;
    fence_async_shared();
    __syncwarp();
    if (lane < C::CTAS) copy_to_cta(in_cta(mail.message(slot), lane), draft, C::MESSAGE_BYTES, in_cta(mail.message_full(slot), lane));
  }
};
