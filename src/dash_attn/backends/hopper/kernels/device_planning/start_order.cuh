// Packed sequences: what their plan is made from, and the order in which the heads of a sequence start.
#pragma once
#include "device_planning/walk.cuh"

DEVICE int tiles_of(int length, int rows) { return (length + rows - 1) / rows; }

// How the heads of a sequence start: as in scheduling/schedule.py for a batch of one, but in no rounds. In a circle (one kind of head,
// gangs), or class by class, heads that walk up and heads that walk down in turns.
template <int Q_ROWS, int KV_ROWS> struct SequenceOrder {
  int q_tiles, kv_tiles, parts, heads, classes, turns;  // heads: parts of all groups
  Dealt up, down;
  bool ring;

  DEVICE SequenceOrder(const PackedParams& p, int q_len, int kv_len)
      : q_tiles(max(1, tiles_of(q_len, Q_ROWS))), kv_tiles(tiles_of(kv_len, KV_ROWS)) {
    const int top = band_top(p.mask, q_len, kv_len),
              low_row = top - (int)p.mask.band_width;  // low_row: first key of query 0, before clipping
    const bool keeps_all = min(Q_ROWS, q_len) + top > (kv_tiles - 1) * KV_ROWS && (q_tiles - 1) * Q_ROWS + low_row < min(KV_ROWS, kv_len);
    ring = keeps_all && kv_tiles > FEW_KV_TILES;
    parts = parts_of(p.split.group, q_len);
    heads = p.heads * parts;
    const int members = tiles_of(p.split.group, parts);
    classes = kv_tiles <= ONE_CLASS || members >= MANY_MEMBERS ? 1 : chain_classes(Q_ROWS, KV_ROWS);
    const int widest = max(1, size_of_class(0)), fillings = members == 1 && classes == 1 && widest >= MANY_KV_TILES ? 2 : 1;
    const int enough = (FILLED_WORKERS * fillings * p.workers + FILLED_OF * widest - 1) / (FILLED_OF * widest), most = (heads + 1) / 2;
    const int walk_up = (heads + 1 - p.head_offset * parts % 2) / 2;
    turns = tiles_of(max(walk_up, heads - walk_up), tiles_of(most, max(1, most / enough)));
    up = Dealt::to(turns, walk_up), down = Dealt::to(turns, heads - walk_up);
  }
  DEVICE int size_of_class(int number) const { return (kv_tiles - number + classes - 1) / classes; }
  // Chains that start first, of heads that walk up, and chains that start last, of heads that walk down; none, where they are not
  // shuffled with those of other sequences: in circles, and where the product of two such numbers would not fit 32 bits.
  DEVICE int first_up() const { return shuffled(up.in(0) * size_of_class(0)); }
  DEVICE int last_down() const { return shuffled(down.in(turns - 1) * size_of_class(classes - 1)); }

 private:
  DEVICE int shuffled(int chains) const { return ring || chains > 0xffff ? 0 : chains; }
};
