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

// Dropout and ALiBi of the elements of a score tile of the forward, as one thread has them: register 4 g + e is query + 8 (e / 2), key
// 8 g + e % 2 from the thread's first ones.
struct ForwardModifiers {
  int4 note;  // the generator's key, low and high word; slope; keys that a sequence has more than queries
  int query, key, lane;

  // first_key: of the tile. query: the thread's first one.
  DEVICE ForwardModifiers(int4 note_of_tile, int first_query, int first_key, int lane_of_warp)
      : note(note_of_tile), query(first_query), key(first_key + 2 * (lane_of_warp & 3)), lane(lane_of_warp) {}

  template <int N> DEVICE void take_off_distances(float (&s)[N]) const {
    const float slope = __int_as_float(note.z), from = (float)(query + note.w - key);
#pragma unroll
    for (int i = 0; i < N; i++) {
      const float distance = from + (float)(8 * (i >> 1 & 1) - 8 * (i / 4) - (i & 1));  // whole numbers: exact
      s[i] = fmaf(-slope, fabsf(distance), s[i]);
    }
  }
  template <int N> DEVICE void drop(float (&s)[N], u32 threshold) const {
    const u32 first = unit_of(query, lane >> 2) ^ (u32)note.y, unit = unit_of(key, 2 * (lane & 3));
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
      const int at = 8 * (i / 2) + (i & 1);
      const uint2 words = philox(first, unit + at, note.x);
      if (drops_low(words.x, threshold)) s[at] = 0.f;
      if (drops_high(words.x, threshold)) s[at + 2] = 0.f;
      if (drops_low(words.y, threshold)) s[at + 4] = 0.f;
      if (drops_high(words.y, threshold)) s[at + 6] = 0.f;
    }
  }
};

// Dropout and ALiBi of the elements of a score tile of the backward, as one thread has them: register 8 k + i is key + 8 (i / 2 % 2),
// query 16 k + 8 (i / 4) + i % 2 from the thread's first ones.
template <bool DROPOUT, bool ALIBI> struct ElementModifiers {
  u32 key_low, key_high, threshold;
  u32 unit_q, unit_k;     // of the first query and key
  float slope, distance;  // from the first key to the first query

  // note: as modifier_notes has written it. key: the thread's first one, in its tile. Of the chain, keys from its first one on: how
  // many there are, and by how many they are more than the queries.
  DEVICE ElementModifiers(int4 note, const ModifierParams& m, int q_row, int key, int lane, int keys, int more_keys)
      : key_low(note.x), key_high(note.y), threshold(m.threshold), unit_q(q_row / 2 + 2 * (lane & 3)),
        unit_k(unit_of(note.w - keys + key, lane >> 2)), slope(__int_as_float(note.z)),
        distance((float)(q_row + 2 * (lane & 3) + more_keys - key)) {}

  // What is taken off the exponent of a weight, in registers 8 k to 8 k + 7: LSE and bias.
  DEVICE float shift(int k, int i, float lse) const {
    if constexpr (!ALIBI) return -lse;
    const float from = distance + (float)(16 * k + 8 * (i / 4) + (i & 1) - 8 * (i >> 1 & 1));  // whole numbers: exact
    return fmaf(-slope, fabsf(from), -lse);
  }
  // Flips the sign of what is dropped there.
  DEVICE void flip(int k, float (&x)[8]) const {
#pragma unroll
    for (int odd = 0; odd < 2; odd++) {
      const uint2 words = philox((unit_q + 8 * k + odd) ^ key_high, unit_k, key_low);
      if (drops_low(words.x, threshold)) x[odd] = -x[odd];
      if (drops_low(words.y, threshold)) x[2 + odd] = -x[2 + odd];
      if (drops_high(words.x, threshold)) x[4 + odd] = -x[4 + odd];
      if (drops_high(words.y, threshold)) x[6 + odd] = -x[6 + odd];
    }
  }
};
