// The warpgroup that owns some columns of the output: it goes through the messages of all tiles, in order. While the product of a tile is
// under way, it waits for the message and V of the next.
#pragma once
#include "common/wgmma.cuh"
#include "decode/cluster_config.cuh"

DEVICE float load_float(u32 shared) { return __int_as_float(load_shared_i32(shared)); }

template <typename Half, typename C> struct ClusterOutputs : ClusterRole {
  Mail<C> mail{shared};
  float out[4];  // rows 2 (lane % 4) and the next, of columns 16 warp + lane / 4 and 8 further

  DEVICE ClusterOutputs(const ClusterRole& role) : ClusterRole(role) {}
  DEVICE void run() {
    const Rounds<C> rounds(unit);
    Ring<typename C::VRing> ring{shared};
    Ring<typename C::MessageRing> messages{shared};
    Ring<typename C::DraftRing> turn{shared};
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = 0.f;
    u32 slot_before = 0;
    int tiles = 0;  // of this round that were read
#pragma unroll 1
    for (int visit = 0; visit < rounds.visits; visit++) {
      const u32 message = messages.address();
      messages.full().wait(messages.phase);
      const float2 rescale = load_shared_f32x2(message + C::RESCALE + (lane & 3) * 8);
      ring.full().wait(ring.phase);
      const int start = rounds.first_key(visit);
      if (start < unit.low || start + C::KV_ROWS > unit.high) clear_values(ring.address(), start);
      wgmma_wait<0>();  // the tile before
      pin(out);
#pragma unroll
      for (int i = 0; i < 4; i++) out[i] *= i & 1 ? rescale.y : rescale.x;
      multiply(message, ring.slot);
      if (visit > 0) release(slot_before, tiles, turn);
      slot_before = ring.slot;
      ring.next();
      messages.next();
    }
    wgmma_wait<0>();
    pin(out);
    __syncwarp();
    if (lane == 0 && rounds.visits > 0) mail.round_read(turn.slot).arrive();
    finish();
  }

 private:
  // As in DecodeConsumer: a weight of 0 does not make a NaN 0.
  DEVICE void clear_values(u32 values, int start) {
    const int first = unit.low - start, end = unit.high - start;
#pragma unroll 1
    for (int i = warp * WARP + lane; i < C::V_BYTES / 16; i += WARPGROUP)
      if (i / (C::V_ROW / 16) < first || i / (C::V_ROW / 16) >= end) store_shared_i32x4(values + i * 16, make_int4(0, 0, 0, 0));
    fence_async_shared();
    named_barrier_sync<CLEARED>(WARPGROUP);
  }
  DEVICE void multiply(u32 message, u32 slot) {  // O^T += V^T P^T
    const u32 a = opaque(base) + slot * (C::V_BYTES / DESCRIPTOR_UNIT), b = opaque(matrix_address(message));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::KV_ROWS / 16; k++)
      wgmma_ss<Half, 1, 0>(true, out, descriptor_of(NARROW_ROWS<C::COLUMNS>, a + descriptor_low(C::V + k * 16 * C::V_ROW, 0)),
                           descriptor_of(NOT_SWIZZLED, b + descriptor_low(k * 2 * C::P_GROUP, C::P_GROUP)));
    wgmma_commit();
  }
  // A tile was read: its V, and with the last of a round also the messages.
  DEVICE void release(u32 slot, int& tiles, Ring<typename C::DraftRing>& turn) {
    __syncwarp();
    if (lane == 0) Barrier{shared + C::VRing::EMPTY}[slot].arrive();
    if (++tiles < C::CTAS) return;
    if (lane == 0) mail.round_read(turn.slot).arrive();
    turn.next();
    tiles = 0;
  }
  // The lane 4 further has the same rows of the next column: each of the two stores one row of both columns.
  DEVICE void finish() {
    named_barrier_sync<SUMMED>(WARPGROUP + WARP);
    if (warp * 16 >= C::COLUMNS) return;  // its columns are those of another warp
    const RowPlace of_sum(p, unit, unit.first_row + (lane >> 2));
    const RowEnd end(p, of_sum, load_float(shared + C::SUMS + lane * 4), load_float(shared + C::SUMS + (WARP + lane) * 4));
    if (of_sum.exists && place == 0 && warp == 0 && (lane & 3) == 0) p.lse[of_sum.lse_at(p, unit)] = end.lse;
    const int second = (lane >> 2) & 1, mine = 2 * (lane & 3) + second;
    const float factor = __int_as_float(__shfl_sync(0xffffffffu, __float_as_int(end.factor), 4 * mine));
    const RowPlace row(p, unit, unit.first_row + mine);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const float theirs = __shfl_xor_sync(0xffffffffu, second ? out[i] : out[i + 1], 4);
      const float x = second ? theirs : out[i], y = second ? out[i + 1] : theirs;
      const int column = place * C::COLUMNS + 16 * warp + 4 * i + (lane >> 2) - second;
      if (row.exists) store_pair<Half>(p, unit, row, column, x * factor, y * factor);
    }
  }
};

// One warp: the row sums, which nobody waits for, and what holds up others: it prepares barriers for the next messages and tells the
// senders of a round that this CTA has read it. (An arrive in another CTA waits for all memory operations before it.)
template <typename C> struct ClusterSums {
  const Unit& unit;
  Mail<C> mail;
  int lane;

  DEVICE void run() {
    const Rounds<C> rounds(unit);
    Ring<typename C::MessageRing> messages{mail.shared};
    Ring<typename C::DraftRing> drafts{mail.shared};
    float highest = MINUS_INFINITY, sum = 0.f;  // of row lane / 4
    int visit = 0;
#pragma unroll 1
    for (int round = 0; rounds.tiles_of(round) > 0; round++) {
#pragma unroll 1
      for (int i = 0; i < rounds.tiles_of(round); i++, visit++) {
        messages.full().wait(messages.phase);
        if (lane == 0 && visit + C::MESSAGES < rounds.visits) messages.full().arrive_expect(C::MESSAGE_BYTES);
        read(messages.address(), highest, sum);
        messages.next();
      }
      mail.round_read(drafts.slot).wait(drafts.phase);
      __syncwarp();
      if (lane < rounds.tiles_of(round)) arrive_in_cta(in_cta(drafts.empty().address, lane));
      drafts.next();
    }
    store_shared_i32(mail.shared + C::SUMS + lane * 4, __float_as_int(highest));
    store_shared_i32(mail.shared + C::SUMS + (WARP + lane) * 4, __float_as_int(sum));
    named_barrier_arrive<SUMMED>(WARPGROUP + WARP);
  }

 private:
  DEVICE void read(u32 message, float& highest, float& sum) {
    highest = load_float(message + C::HIGHEST + (lane >> 2) * 4);
    float part[C::LANES];
#pragma unroll
    for (int i = 0; i < C::LANES; i++) part[i] = load_float(message + C::PARTS + (i * C::ROWS * 4 + lane) * 4);
    sum = add_to_sum(sum, load_float(message + C::RESCALE + (lane >> 2) * 4), part);
  }
};
