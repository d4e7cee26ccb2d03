// Dropout and ALiBi of the elements of a score tile of the forward, as one thread has them: register 4 g + e is query + 8 (e / 2), key
// 8 g + e % 2 from the thread's first ones.
#pragma once
#include "common/modifiers.cuh"

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
