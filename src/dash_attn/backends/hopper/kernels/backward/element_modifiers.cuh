// Dropout and ALiBi of the elements of a score tile of the backward, as one thread has them: register 8 k + i is key + 8 (i / 2 % 2),
// query 16 k + 8 (i / 4) + i % 2 from the thread's first ones.
#pragma once
#include "common/modifiers.cuh"

// Of one thread in one step.
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
