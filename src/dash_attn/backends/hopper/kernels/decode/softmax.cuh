// What the forward's consumer does to the scores of a row, step by step (forward/consumer.cuh), for both decode kernels. A thread holds
// SCORES / 2 scores of each of two rows, r = 0 and 1.
#pragma once
#include "decode/places.cuh"

// Independent parts of the sums of a row, as in the forward.
__host__ __device__ constexpr int sum_lanes(int dim) { return dim == 64 ? 4 : 1; }

template <int SCORES> DEVICE float& row_score(float (&s)[SCORES], int r, int i) { return s[4 * (i / 2) + 2 * r + (i & 1)]; }

// Of a row in this tile. How maxima are grouped does not change them.
template <int SCORES> DEVICE float tile_max(float (&s)[SCORES], int r) {
  float largest = row_score(s, r, 0);
#pragma unroll
  for (int i = 1; i < SCORES / 2; i++) largest = fmaxf(largest, row_score(s, r, i));
  largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
  return fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
}

DEVICE float shift_of(float largest, float scale_log2) { return largest == MINUS_INFINITY ? 0.f : __fmul_rn(largest, scale_log2); }
DEVICE float weight_of(float score, float scale_log2, float shift) { return exp2_approx(fmaf(score, scale_log2, -shift)); }
// What output and sum so far must be multiplied by.
DEVICE float rescale_of(float before, float scale_log2, float shift) { return exp2_approx(__fmul_rn(before, scale_log2) - shift); }

// Scores become weights, `part` their sums over this thread's columns. Returns the rescale factor.
template <int SCORES, int LANES>
DEVICE float weigh(float (&s)[SCORES], int r, float before, float largest, float scale_log2, float (&part)[LANES]) {
  const float shift = shift_of(largest, scale_log2);
#pragma unroll
  for (int i = 0; i < SCORES / 2; i++) {
    float& x = row_score(s, r, i);
    x = weight_of(x, scale_log2, shift);
    part[i % LANES] = i < LANES ? x : part[i % LANES] + x;
  }
  return rescale_of(before, scale_log2, shift);
}

template <int LANES> DEVICE float add_to_sum(float sum, float rescale, const float (&part)[LANES]) {
  sum = fmaf(sum, rescale, part[0]);
#pragma unroll
  for (int i = 1; i < LANES; i++) sum += part[i];
  return sum;
}

// A row of the unit, and where it lies in the caller's tensors.
struct RowPlace {
  bool exists;
  int query, head;

  DEVICE RowPlace(const DecodeParams& p, const Unit& unit, int row)
      : exists(row < unit.rows), query(row / p.group), head(unit.kv_head * p.group + row - query * p.group) {}
  DEVICE i64 token(const DecodeParams& p, const Unit& unit) const {
    return p.cu_q != nullptr ? (i64)unit.q_start + query : (i64)unit.sequence * p.q_len + query;
  }
  DEVICE i64 lse_at(const DecodeParams& p, const Unit& unit) const {
    return p.cu_q != nullptr ? (i64)head * p.tokens + unit.q_start + query : ((i64)unit.sequence * p.q_heads + head) * p.q_len + query;
  }
};

struct RowEnd {
  float factor, lse;  // factor: of the output

  DEVICE RowEnd(const DecodeParams& p, const RowPlace& row, float row_max, float row_sum) {
    float sum = row_sum, top = __fmul_rn(row_max, p.scale_log2), shrink = 1.f;
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const float logit = p.sinks != nullptr && row.exists ? p.sinks[row.head] : MINUS_INFINITY;
    if (p.sinks != nullptr) {
      const float sink = __fmul_rn(logit, LOG2_E), higher = fmaxf(top, sink);
      if (higher != MINUS_INFINITY) {
        shrink = exp2_approx(top - higher);
        sum = fmaf(sum, shrink, exp2_approx(sink - higher));
        top = higher;
      }
    }
    factor = sum == 0.f ? 0.f : shrink / sum;  // a query that attends nothing has output 0 and LSE -inf; NaN stays NaN
    lse = sum == 0.f ? MINUS_INFINITY : (top + __log2f(sum)) * LN_2;
    if (p.sinks != nullptr && row_max == MINUS_INFINITY && row_sum == 0.f) lse = logit;  // just the sink, unrounded
  }
};

// 16 bytes of Q, from column `column` on; columns beyond the head dim are 0.
DEVICE int4 load_query(const DecodeParams& p, const Unit& unit, int row, int column) {
  const RowPlace place(p, unit, row);
  if (!place.exists || column >= p.q_dim) return make_int4(0, 0, 0, 0);
  const i64 batch = p.cu_q == nullptr ? unit.sequence : 0;
  const i64 offset = batch * p.q_strides[0] + (i64)(unit.q_start + place.query) * p.q_strides[1] + place.head * p.q_strides[2] + column;
  return *reinterpret_cast<const int4*>(static_cast<const short*>(p.q) + offset);
}

// Two neighbouring columns of the output.
template <typename Half>
DEVICE void store_pair(const DecodeParams& p, const Unit& unit, const RowPlace& row, int column, float x, float y) {
  if (column < p.v_dim) static_cast<u32*>(p.out)[((row.token(p, unit) * p.q_heads + row.head) * p.v_dim + column) / 2] = pack<Half>(x, y);
}
