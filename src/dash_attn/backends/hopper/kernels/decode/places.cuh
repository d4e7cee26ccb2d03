// Which queries and keys a unit has, from lengths and pages that only the device knows, and where its rows lie in the caller's tensors. What is
// wrong stops the kernel.
#pragma once
#include "common/softmax.cuh"

// Slots of one sequence in the cache. The key at position p has slot `origin` + p; there are keys from `position` on, 0 unless the
// cache dropped some. `end` is the slot behind the last key, `length` what it was before the call.
struct CacheSlots {
  int origin, position, length, end, row;  // row: of a cache without pages

  DEVICE CacheSlots(const CacheParams& c, int sequence) {
    length = c.lengths == nullptr ? c.length : c.lengths[sequence];
    const int first = c.left_padding == nullptr ? 0 : c.left_padding[sequence];
    position = c.positions == nullptr ? c.position : c.positions[sequence];
    row = c.rows == nullptr ? sequence : c.rows[sequence];
    end = length + c.added;
    if (length < 0 || length > c.capacity - c.added) report_and_trap(c.report, Trouble::CacheLength, c.call, sequence, length);
    if (first < 0 || first > length) report_and_trap(c.report, Trouble::CachePadding, c.call, sequence, first);
    if (position < 0 || position > (1 << 30)) report_and_trap(c.report, Trouble::CachePosition, c.call, sequence, position);
    origin = first - position;
    if (c.pages == nullptr && (row < 0 || row >= c.count)) report_and_trap(c.report, Trouble::CacheRow, c.call, sequence, row);
  }
};

// Where a slot is: a page and a row in it, or a row of the cache and the slot itself. A page is looked up when this is made and
// looked at when it is asked for, so that the look-up of the next slot runs under other waits.
struct PlaceOfSlot {
  int entry, page, row;

  DEVICE PlaceOfSlot(const CacheParams& c, const CacheSlots& slots, int sequence, int slot) : entry(0), page(slots.row), row(slot) {
    if (c.pages == nullptr) return;
    entry = slot / c.page_size;
    row = slot - entry * c.page_size;
    page = c.pages[(i64)sequence * c.page_stride + entry];
  }
  DEVICE int2 checked(const CacheParams& c, int sequence) const {
    if (page < 0 || page >= c.count) report_and_trap(c.report, Trouble::CachePage, c.call, sequence, entry);
    return make_int2(page, row);
  }
};

// Keys count from the sequence's first one.
struct KeyRange {
  int first, end;

  DEVICE KeyRange(const DecodeParams& p, int query, int q_len, int keys) {
    const int position = query + keys - q_len;  // the last query is aligned with the last key
    first = p.window_left < 0 ? 0 : max(0, position - p.window_left);
    end = p.window_right < 0 ? keys : min(keys, position + p.window_right + 1);
  }
};

struct Unit {
  int sequence, kv_head, first_row, end_row;  // the rows of all units of a sequence and KV head: [query][query head of the group]
  int q_start, q_len, rows;  // q_start: first query in the caller's tensor, if queries are packed
  int keys;
  int low, high;  // keys that any row attends
  int lowest_full, end_full;  // keys that every row attends

  DEVICE Unit(const DecodeParams& p, int unit, int rows_of_unit) {
    const int head = unit / p.row_tiles;
    sequence = head / p.kv_heads;
    kv_head = head - sequence * p.kv_heads;
    first_row = (unit - head * p.row_tiles) * rows_of_unit;
    end_row = first_row + rows_of_unit;
    q_start = 0;
    q_len = p.q_len;
    if (p.cu_q != nullptr) {
      q_start = p.cu_q[sequence];
      q_len = checked_length(p, sequence, q_start, p.cu_q[sequence + 1]);
    }
    rows = q_len * p.group;
  }
  DEVICE bool has_rows() const { return first_row < rows; }
  DEVICE void look_at_keys(const DecodeParams& p, const CacheSlots& slots) {
    keys = slots.end - slots.origin;
    const KeyRange top(p, first_row / p.group, q_len, keys), bottom(p, (min(end_row, rows) - 1) / p.group, q_len, keys);
    low = top.first;
    high = bottom.end;
    lowest_full = bottom.first;
    end_full = top.end;
    if (low < high && low < slots.position) report_and_trap(p.cache.report, Trouble::CachePosition, p.cache.call, sequence, slots.position);
  }
  template <int KV_ROWS> DEVICE int last_tile() const { return (high - 1) / KV_ROWS; }
  template <int KV_ROWS> DEVICE int visits() const { return low < high ? last_tile<KV_ROWS>() - low / KV_ROWS + 1 : 0; }

 private:
  static DEVICE int checked_length(const DecodeParams& p, int sequence, int start, int end) {
    const bool ends_wrong = (sequence == 0 && start != 0) || (sequence == p.count - 1 && end != p.tokens);
    if (ends_wrong || start < 0 || end < start || end > p.tokens || end - start > p.q_len)
      report_and_trap(p.cache.report, Trouble::BadLengths, p.cache.call, 0, sequence);
    return end - start;
  }
};

// A row of a unit in the caller's tensors.
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
