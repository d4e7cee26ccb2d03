// Rows of a unit, and where they lie in the caller's tensors: for both decode kernels.
#pragma once
#include "common/softmax.cuh"
#include "decode/places.cuh"

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

// As finish_rows of forward/consumer.cuh.
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
