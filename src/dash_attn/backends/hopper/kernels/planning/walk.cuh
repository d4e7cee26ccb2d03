// Packed sequences: the walk of a chain, computed from the lengths of its sequence instead of read from a table, because the
// lengths are known on the device only. The orders are those of scheduling/generators/auto.py: where a sequence keeps every tile,
// `shift_blocks`, unless it has few KV tiles; else `alternating`. Tests compare bits and tickets with those of the same
// sequence alone.
#pragma once
#include "common/plan_tables.cuh"

// Classes of `alternating`: KV tiles a hand-over needs between neighbours.
DEVICE constexpr int chain_classes(int q_rows, int kv_rows) { return (HAND_OVER * q_rows + kv_rows - 1) / kv_rows; }

template <int Q_ROWS, int KV_ROWS> struct PackedWalk {
  static constexpr int CLASSES = chain_classes(Q_ROWS, KV_ROWS);
  static_assert(CLASSES <= 2, "the count of smaller classes below knows two");

  static DEVICE Step step(const PackedChain& chain, int i) {
    int q_tile = read(chain.q_first) + i * read(chain.q_stride);
    const int ring = read(chain.ring);
    if (ring && q_tile >= ring) q_tile -= ring;
    const int turn = ring ? turn_in_ring(chain, q_tile) : turn_in_band(chain, q_tile);
    return {q_tile, turn, q_tile < read(chain.full_first) || q_tile >= read(chain.full_end)};
  }

 private:
  // Members pass a Q tile in the order of their steps on it: first those that have not wrapped around, last place first.
  static DEVICE int turn_in_ring(const PackedChain& chain, int q_tile) {
    const int members = read(chain.members), place = read(chain.place);
    const int last = min(members - 1, q_tile >> (read(chain.spacing) - 1));  // last member that starts at this Q tile or before
    return read(chain.turn_first) + (place > last ? members : 0) + last - place;
  }
  // KV tiles `low` to `high` visit a Q tile: class by class, then downward (heads that walk up) or upward. (The last query
  // attends the last key, so that `high` needs no care at the end of the queries.)
  static DEVICE int turn_in_band(const PackedChain& chain, int q_tile) {
    const int last = read(chain.kv_tiles) - 1, kv_tile = read(chain.kv_tile);
    const u32 high = min(last, (q_tile * Q_ROWS + read(chain.high)) / KV_ROWS),
              low = max(0, q_tile * Q_ROWS + read(chain.low)) / (u32)KV_ROWS;
    const u32 distance = read(chain.q_stride) > 0 ? high - kv_tile : kv_tile - low;
    if (CLASSES == 1 || read(chain.classes) == 1) return distance;
    return distance / 2 + (kv_tile % 2 ? high / 2 - (low + 1) / 2 + 1 : 0);
  }
};
