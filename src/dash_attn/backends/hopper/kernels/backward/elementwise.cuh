// What both kinds of consumers do with the elements of a score tile. Register 4 g + e of a tile is key row + 8 (e / 2), query
// column 8 g + 2 (lane % 4) + e % 2; a group is four registers with one pair of row statistics.
#pragma once
#include "common/ptx.cuh"

// In units of the cap: exp2 multiplies by it.
template <int N> DEVICE void cap_scores(float (&s)[N], float cap_scale) {
#pragma unroll
  for (int i = 0; i < N; i++) s[i] = tanh_half_log2(s[i] * cap_scale);
}

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

// The same in two steps, with P from elsewhere.
DEVICE void subtract_delta(float* dp, float2 delta) {
#pragma unroll
  for (int e = 0; e < 4; e++) dp[e] -= (e & 1) ? delta.y : delta.x;
}
template <typename Half> DEVICE void multiply_by_p(const float* dp, float4 probability, u32* packed) {
  packed[0] = pack<Half>(probability.x * dp[0], probability.y * dp[1]);
  packed[1] = pack<Half>(probability.z * dp[2], probability.w * dp[3]);
}
