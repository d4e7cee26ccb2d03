// What consumers do with the elements of a score tile. Register 4 g + e of a tile is key row + 8 (e / 2), query column
// 8 g + 2 (lane % 4) + e % 2; a group is four registers with one pair of row statistics.
#pragma once
#include "backward/config.cuh"
#include "common/modifiers.cuh"

// P = exp2(S scale - LSE) of one group, packed; S becomes what dS needs: P, times the slope of the cap.
template <typename Half, bool SOFTCAP> DEVICE void exponentiate_group(float* s, float2 lse, float scale, u32* packed) {
  float x[4];
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const float capped = s[e];
    x[e] = exp2_approx(fmaf(capped, scale, (e & 1) ? -lse.y : -lse.x));
    s[e] = SOFTCAP ? x[e] * fmaf(-capped, capped, 1.f) : x[e];
  }
  packed[0] = pack<Half>(x[0], x[1]);
  packed[1] = pack<Half>(x[2], x[3]);
}

// dS = P (dP - delta) of one group, packed.
template <typename Half> DEVICE void differentiate_group(const float* s, const float* dp, float2 delta, u32* packed) {
  packed[0] = pack<Half>(s[0] * (dp[0] - delta.x), s[1] * (dp[1] - delta.y));
  packed[1] = pack<Half>(s[2] * (dp[2] - delta.x), s[3] * (dp[3] - delta.y));
}

// ---- under dropout and ALiBi. A dropped weight has its sign flipped: what dV needs of it is 0, and dS needs both the weight and that it
// was dropped.

// `more_keys` of a chain.
template <MaskKind MASK, typename C> DEVICE int more_keys(const Notes<C>& notes, const Pipeline& pipe, const MaskParams& mask) {
  if constexpr (is_band(MASK)) return notes.template mask_from<MASK>(pipe) - mask.band_right;
  return notes.keys(pipe) - mask.q_len;
}

// exponentiate_group for sixteen queries, registers 8 k to 8 k + 7. P is packed with 0 where it is dropped; S becomes what dS needs, with
// the signs of dropout.
template <typename Half, bool SOFTCAP, bool DROPOUT, bool ALIBI> DEVICE void exponentiate_sixteen(const ElementModifiers<DROPOUT, ALIBI>& m,
                                                                                                  int k, float* s, const float2 (&lse)[2],
                                                                                                  float scale, u32* packed) {
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = exp2_approx(fmaf(s[i], scale, m.shift(k, i, (i & 1) ? lse[i / 4].y : lse[i / 4].x)));
  if constexpr (DROPOUT) m.flip(k, x);
#pragma unroll
  for (int i = 0; i < 8; i++) s[i] = SOFTCAP ? x[i] * fmaf(-s[i], s[i], 1.f) : x[i];
#pragma unroll
  for (int i = 0; i < 4; i++) packed[i] = pack<Half, DROPOUT>(x[2 * i], x[2 * i + 1]);
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
