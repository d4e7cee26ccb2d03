// Packed sequences: what their plan is made from, and the order in which the heads of a sequence start.
#pragma once
#include "planning/walk.cuh"

DEVICE int tiles_of(int length, int rows) { return (length + rows - 1) / rows; }

// Chains of a block of `shift_blocks`.
DEVICE int largest_block(int q_tiles) { return q_tiles <= SINGLE_CHAINS ? 1 : min(LARGEST_BLOCK, (q_tiles + 1) / 2); }

// The Q tiles that a chain visits: those in which a query attends a key of its KV tile.
template <int Q_ROWS, int KV_ROWS> struct Visits {
  int first, count;
  DEVICE Visits(int kv_tile, int q_len, int kv_len, int band_top, int band_width) {
    const int first_key = kv_tile * KV_ROWS, end_key = min(first_key + KV_ROWS, kv_len);
    const int first_row = max(0, first_key - band_top), end_row = min(q_len, end_key - band_top + band_width);
    first = first_row / Q_ROWS;
    count = first_row < end_row ? (end_row - 1) / Q_ROWS - first + 1 : 0;
  }
};

// How the heads of a sequence start: as in scheduling/schedule.py for a batch of one, but in no rounds. In a circle (one kind of head,
// gangs), or class by class, heads that walk up and heads that walk down in turns.
template <int Q_ROWS, int KV_ROWS> struct SequenceOrder {
  int q_tiles, kv_tiles, parts, heads, classes, turns;  // heads: parts of all groups
  int piece;                                            // chains of a segment, at most
  Dealt up, down;
  bool ring;

  DEVICE SequenceOrder(const PackedParams& p, int q_len, int kv_len)
      : q_tiles(max(1, tiles_of(q_len, Q_ROWS))), kv_tiles(tiles_of(kv_len, KV_ROWS)) {
    const int top = band_top(p.mask, q_len, kv_len),
              low_row = top - (int)p.mask.band_width;  // low_row: first key of query 0, before clipping
    const bool first_sees_last = min(Q_ROWS, q_len) + top > (kv_tiles - 1) * KV_ROWS;
    const bool last_sees_first = (q_tiles - 1) * Q_ROWS + low_row < min(KV_ROWS, kv_len);
    ring = first_sees_last && last_sees_first && (kv_tiles > FEW_KV_TILES || (kv_tiles > 1 && kv_tiles <= largest_block(q_tiles)));
    const int one_class = last_sees_first && !first_sees_last ? ONE_CAUSAL_CLASS : ONE_CLASS;
    parts = parts_of(p.split.group, q_len);
    heads = p.heads * parts;
    const int members = tiles_of(p.split.group, parts);
    classes = kv_tiles <= one_class || members >= MANY_MEMBERS ? 1 : chain_classes(Q_ROWS, KV_ROWS);
    const int widest = max(1, size_of_class(0)), fillings = members == 1 && classes == 1 && widest >= MANY_KV_TILES ? 2 : 1;
    const int filling = (FILLED_WORKERS * fillings * p.workers + FILLED_OF * widest - 1) / (FILLED_OF * widest);
    const Pace pace = pace_of(p, q_len, kv_len, top);
    const int under_way = FILLED_OF * max(1, min(kv_tiles, SIXTEENTHS * pace.lengths * members / max(1, pace.lag)));
    const int busy = (FILLED_WORKERS * p.workers + under_way - 1) / under_way, most = (heads + 1) / 2;
    const int enough = max(filling, min(busy, CACHED * KV_ROWS / q_tiles));
    const int even = tiles_of(widest, tiles_of(widest, p.workers));
    piece = widest;
    if (2 * most <= busy && pace.lag >= LATE)
      piece = min(widest, tiles_of(q_tiles * members, HAND_OVER));
    else if (pace.lag >= SIXTEENTHS && classes == 1 && q_tiles >= TOO_LONG * CACHED * KV_ROWS &&
             FILLED_OF * even >= FILLED_WORKERS * p.workers)
      piece = even;
    const int walk_up = (heads + 1 - p.head_offset * parts % 2) / 2;
    turns = tiles_of(max(walk_up, heads - walk_up), tiles_of(most, max(1, most / enough)));
    up = Dealt::to(turns, walk_up), down = Dealt::to(turns, heads - walk_up);
  }
  DEVICE int size_of_class(int number) const { return (kv_tiles - number + classes - 1) / classes; }
  // Chains that start first, of heads that walk up, and chains that start last, of heads that walk down; none, where they are not
  // shuffled with those of other sequences: in circles, and where the product of two such numbers would not fit 32 bits.
  DEVICE int first_up() const { return shuffled(up.in(0) * min(piece, size_of_class(0))); }
  DEVICE int last_down() const {
    const int last_class = size_of_class(classes - 1);
    return shuffled(down.in(turns - 1) * (last_class - max(0, last_class - 1) / piece * piece));
  }

 private:
  // Sixteenths of a step by which a chain starts later than the one before it, and the lengths of the first and the last chain.
  struct Pace {
    int lag, lengths;
  };
  DEVICE Pace pace_of(const PackedParams& p, int q_len, int kv_len, int top) const {
    using Tiles = Visits<Q_ROWS, KV_ROWS>;
    const int width = (int)p.mask.band_width, gaps = max(1, kv_tiles - 1);
    const Tiles one(0, q_len, kv_len, top, width), last(kv_tiles - 1, q_len, kv_len, top, width);
    const int ahead_up = classes * (last.first - one.first), ahead_down = ahead_up + classes * (last.count - one.count);
    const int late = max(0, HAND_OVER * gaps - ahead_up) + max(0, HAND_OVER * gaps - ahead_down);
    return {SIXTEENTHS * late / gaps, one.count + last.count};
  }
  DEVICE int shuffled(int chains) const { return ring || chains > 0xffff ? 0 : chains; }
};
