// Dropout and ALiBi of whole score tiles, thread by thread, written where each element belongs.
#include "common/modifiers.cuh"

extern "C" {
unsigned long long key_of(long long seed, long long first_head, int head) {
  const u64 seeds[2] = {0, (u64)seed};
  ModifierParams m = {};
  m.seeds = seeds, m.first_head = first_head;
  return dropout_key(m, 1, head);
}
float slope_at(const float* slopes, int stride, float factor, int sequence, int head) {
  ModifierParams m = {};
  m.slopes = slopes, m.slope_stride = stride, m.slope_factor = factor;
  return slope_of(m, sequence, head);
}
// 64 queries from `query` on, 80 keys from `key` on: weights 1 that are kept, and biases. more: keys than queries.
void forward_tile(unsigned long long generator, float slope, int more, int query, int key, unsigned threshold, float* kept, float* bias) {
  for (int warp = 0; warp < 4; warp++)
    for (int lane = 0; lane < 32; lane++) {
      const int4 note = {(int)(u32)generator, (int)(u32)(generator >> 32), __float_as_int(slope), more};
      const ForwardModifiers modifiers(note, query + 16 * warp + (lane >> 2), key, lane);
      float weights[40], scores[40];
      for (int i = 0; i < 40; i++) weights[i] = 1.f, scores[i] = 0.f;
      modifiers.drop(weights, threshold);
      modifiers.take_off_distances(scores);
      for (int i = 0; i < 40; i++) {
        const int row = 16 * warp + (lane >> 2) + 8 * (i >> 1 & 1), column = 8 * (i / 4) + 2 * (lane & 3) + (i & 1);
        kept[row * 80 + column] = weights[i], bias[row * 80 + column] = scores[i];
      }
    }
}
// 128 queries from `query` on, 64 keys of the second warpgroup of a tile whose first key is `key`. kv_len: of the sequence.
void backward_tile(unsigned long long generator, float slope, int more, int query, int key, int kv_len, unsigned threshold, float* kept,
                   float* bias) {
  ModifierParams m = {};
  m.threshold = threshold;
  for (int warp = 0; warp < 4; warp++)
    for (int lane = 0; lane < 32; lane++) {
      const int4 note = {(int)(u32)generator, (int)(u32)(generator >> 32), __float_as_int(slope), kv_len};
      const int local = 64 + 16 * warp + (lane >> 2);
      const ElementModifiers<true, true> modifiers(note, m, query, local, lane, kv_len - key, more - key);
      for (int k = 0; k < 8; k++) {
        float weights[8] = {1, 1, 1, 1, 1, 1, 1, 1};
        modifiers.flip(k, weights);
        for (int i = 0; i < 8; i++) {
          const int row = 16 * k + 8 * (i / 4) + 2 * (lane & 3) + (i & 1), column = 16 * warp + (lane >> 2) + 8 * (i >> 1 & 1);
          kept[row * 64 + column] = weights[i], bias[row * 64 + column] = modifiers.shift(k, i, 0.f);
        }
      }
    }
}
}
