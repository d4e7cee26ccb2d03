// Packed sequences: the walk of a chain, computed from the lengths of its sequence instead of read from a table, because the
// lengths are known on the device only. The orders are those of dash_attn/generators/auto.py: where a sequence keeps every tile,
// `shift_blocks` if it has more than a few KV tiles; else `alternating`. Tests compare bits and tickets with those of the same
// sequence alone.
#pragma once
#include "common/plan_tables.cuh"

struct alignas(16) PackedChain {
  int q_first, q_stride, ring;           // Q tile of the first step, then q_stride further; modulo `ring` if that is not 0
  int full_first, full_end;              // Q tiles all of whose elements attend
  int kv_tile, kv_tiles, classes;
  int high, low;                         // band: last key that Q tile 0 attends, and first key (may be negative)
  int place, spacing, members, rank_first;  // ring: place among the members of its block, 1 or 2 tiles apart; ranks of the blocks before
};

// As in generators/auto.py, generators/alternating.py and schedule.py.
constexpr int FEW_KV_TILES = 16, ONE_CLASS = 8, LARGE_GROUP = 4, MANY_KV_TILES = 64;

// Classes of `alternating`: KV tiles a hand-over needs between neighbours.
DEVICE constexpr int chain_classes(int q_rows, int kv_rows) { return (2 * q_rows + kv_rows - 1) / kv_rows; }

template <int Q_ROWS, int KV_ROWS> struct PackedWalk {
  static constexpr int CLASSES = chain_classes(Q_ROWS, KV_ROWS);
  static_assert(CLASSES <= 2, "the count of smaller classes below knows two");

  static DEVICE Step step(const PackedChain& chain, int i) {
    int q_tile = read(chain.q_first) + i * read(chain.q_stride);
    const int ring = read(chain.ring);
    if (ring && q_tile >= ring) q_tile -= ring;
    const int rank = ring ? rank_in_ring(chain, q_tile) : rank_in_band(chain, q_tile);
    return {q_tile, rank, q_tile < read(chain.full_first) || q_tile >= read(chain.full_end)};
  }

 private:
  // Members pass a Q tile in the order of their steps on it: first those that have not wrapped around, last place first.
  static DEVICE int rank_in_ring(const PackedChain& chain, int q_tile) {
    const int members = read(chain.members), place = read(chain.place);
    const int last = min(members - 1, q_tile >> (read(chain.spacing) - 1));  // last member that starts at this Q tile or before
    return read(chain.rank_first) + (place > last ? members : 0) + last - place;
  }
  // KV tiles `low` to `high` visit a Q tile: class by class, then downward (heads that walk up) or upward. (The last query
  // attends the last key, so that `high` needs no care at the end of the queries.)
  static DEVICE int rank_in_band(const PackedChain& chain, int q_tile) {
    const int last = read(chain.kv_tiles) - 1, kv_tile = read(chain.kv_tile);
    const u32 high = min(last, (q_tile * Q_ROWS + read(chain.high)) / KV_ROWS), low = max(0, q_tile * Q_ROWS + read(chain.low)) / (u32)KV_ROWS;
    const u32 distance = read(chain.q_stride) > 0 ? high - kv_tile : kv_tile - low;
    if (CLASSES == 1 || read(chain.classes) == 1) return distance;
    return distance / 2 + (kv_tile % 2 ? high / 2 - (low + 1) / 2 + 1 : 0);
  }
};
