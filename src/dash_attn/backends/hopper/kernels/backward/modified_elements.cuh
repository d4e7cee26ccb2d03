// What consumers do with the elements of a score tile under dropout and ALiBi, instead of backward/elementwise.cuh. A dropped weight
// has its sign flipped: what dV needs of it is 0, and dS needs both the weight and that it was dropped.
#pragma once
#include "backward/config.cuh"
#include "backward/element_modifiers.cuh"

// `more_keys` of a chain.
template <MaskKind MASK, typename C> DEVICE int more_keys(const Notes<C>& notes, const Pipeline& pipe, const MaskParams& mask) {
  if constexpr (is_band(MASK)) return notes.template mask_from<MASK>(pipe) - mask.band_right;
  return notes.keys(pipe) - mask.q_len;
}

// exponentiate_group for sixteen queries, registers 8 k to 8 k + 7. Returns P in x, with the signs of dropout; S becomes what dS needs.
template <bool SOFTCAP, bool DROPOUT, bool ALIBI> DEVICE void exponentiate_sixteen(const ElementModifiers<DROPOUT, ALIBI>& m, int k,
                                                                                   float* s, const float2 (&lse)[2], float scale,
                                                                                   float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = exp2_approx(fmaf(s[i], scale, m.shift(k, i, (i & 1) ? lse[i / 4].y : lse[i / 4].x)));
  if constexpr (DROPOUT) m.flip(k, x);
#pragma unroll
  for (int i = 0; i < 8; i++) s[i] = SOFTCAP ? x[i] * fmaf(-s[i], s[i], 1.f) : x[i];
}
// P of two elements, 0 where it is dropped.
template <typename Half, bool DROPOUT> DEVICE u32 pack_kept(float low, float high) {
  if constexpr (DROPOUT) return pack_positive<Half>(low, high);
  return pack<Half>(low, high);
}
// dP - delta; of a dropped weight, which is negative, delta.
DEVICE float dropped_difference(float weight, float dp, float rescale, float delta) {
  const float kept = fmaf(dp, rescale, -delta);
  return weight < 0.f ? delta : kept;
}
// dS = P (dP - delta) of one group, packed.
template <typename Half> DEVICE void differentiate_dropped(const float* s, const float* dp, float2 delta, float rescale, u32* packed) {
#pragma unroll
  for (int i = 0; i < 2; i++)
    packed[i] = pack<Half>(s[2 * i] * dropped_difference(s[2 * i], dp[2 * i], rescale, delta.x),
                           s[2 * i + 1] * dropped_difference(s[2 * i + 1], dp[2 * i + 1], rescale, delta.y));
}
