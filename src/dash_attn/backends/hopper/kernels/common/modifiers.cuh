// Dropout and ALiBi: the same numbers and distances as call/dropout.py and backends/cpu/tiles.py compute.
#pragma once
#include "common/ptx.cuh"

constexpr int MODIFIER_NOTE_BYTES = 16;  // of an int4 in shared memory, behind the storage of a kernel: one per stage or slot

// ---- the generator
DEVICE u64 mixed(u64 x) {  // the finalizer of SplitMix64
  x = (x ^ x >> 30) * MIX_1;
  x = (x ^ x >> 27) * MIX_2;
  return x ^ x >> 31;
}
// `head`: among the query heads of the call.
DEVICE u64 dropout_key(const ModifierParams& m, int sequence, int head) {
  return mixed(mixed(m.seeds[sequence]) + (u64)(m.first_head + head + 1) * MIX_GAMMA);
}
// Philox2x32: the numbers of four pairs, two keys 8 apart (x, y) and two queries 8 apart (low half, high half).
DEVICE uint2 philox(u32 first, u32 second, u32 key) {
#pragma unroll
  for (int turn = 0; turn < PHILOX_ROUNDS; turn++) {
    const u64 product = (u64)first * PHILOX_MULTIPLIER;
    first = (u32)(product >> 32) ^ (key + turn * PHILOX_KEY_STEP) ^ second;
    second = (u32)product;
  }
  return make_uint2(first, second);
}
// Whether a number drops its pair. `threshold` is in the high half.
DEVICE bool drops_low(u32 word, u32 threshold) { return word << 16 >= threshold; }
DEVICE bool drops_high(u32 word, u32 threshold) { return word >= threshold; }

// A position counted in units of dropout, where only one of each two that are 8 apart counts. `row` is the first one.
DEVICE u32 unit_of(int position, int row) { return (u32)(position - row) / 2 + row; }

// ---- ALiBi
DEVICE float slope_of(const ModifierParams& m, int sequence, int head) {
  return m.slopes == nullptr ? 0.f : __fmul_rn(m.slopes[(i64)sequence * m.slope_stride + head], m.slope_factor);
}
