// Attention to a cache where units are fewer than SMs: a cluster of CTAs serves one unit, and no bit changes.
//
// The online softmax goes from KV tile to KV tile, but only its products with V have to. Tile i of a unit (in the order of the visit)
// belongs to CTA i % CTAS, which computes its scores and their maxima. All tell all their maxima, so each knows the maximum before its
// own tile. It then sends everybody a message: weights in 16 bits, the rescale factor, the parts of the row sums. Each CTA owns some
// columns of V and of the output and goes through all messages in order: row sum, O *= rescale, O += P V, as one CTA would.
// Every byte of K and V is read once, and nothing is recombined.
//
// A unit has 8 rows here. Products have at least 64 rows but may have 8 columns, so the operands change places: S^T = K Q^T and
// O^T += V^T P^T. The bits are the same. Where a CTA owns fewer than 64 columns of V, these are the rows of the product again and again:
// the stride between groups of them is 0.
//
// Nobody waits for ever: of two things that a CTA does, the later round waits for earlier rounds only. Messages of round t need those of
// round t - 3 to be read; these need V of that round, whose loader waits for nothing else.
#pragma once
#include "common/cluster.cuh"
#include "decode/config.cuh"
#include "decode/places.cuh"

// What a Ring is made for: where its slots and barriers begin.
template <int RING_, int KV_BYTES_, int SLOTS_, int FULL_, int EMPTY_> struct RingAt {
  static constexpr int RING = RING_, KV_BYTES = KV_BYTES_, SLOTS = SLOTS_, FULL = FULL_, EMPTY = EMPTY_, CONSUMER_WARPS = 4;
};

template <int D_, int COLUMNS_> struct ClusterConfig {
  static constexpr int D = D_, KV_ROWS = forward_kv_rows(D), ROWS = 8, COLUMNS = COLUMNS_, CTAS = D / COLUMNS, LANES = sum_lanes(D);
  // Warps: scores (warpgroups that take rounds in turn), outputs, K, sums, V.
  static constexpr int GROUPS = 2, V_WARPS = 2, FIRST_LOADER = 4 * GROUPS + 4, WARPS = FIRST_LOADER + 2 + V_WARPS, THREADS = WARPS * WARP;
  static constexpr int PANELS = D / 64, KV_PANEL = KV_ROWS * PANEL_ROW, GROUP = ROWS * PANEL_ROW;  // a group: 8 rows of a panel
  static constexpr int Q_BYTES = PANELS * GROUP, K_BYTES = PANELS * KV_PANEL, V_ROW = 2 * COLUMNS, V_BYTES = KV_ROWS * V_ROW;
  static constexpr int P_GROUP = ROWS * 16, P_BYTES = KV_ROWS / 8 * P_GROUP;
  static constexpr int K_SLOTS = 3 * 128 / D, V_SLOTS = COLUMNS == 16 ? 12 : COLUMNS == 32 ? 8 : 5;
  static constexpr int ROUNDS = COLUMNS == 16 ? 3 : 4, MESSAGES = ROUNDS * CTAS;  // messages under way
  static constexpr int TOLD = 8;  // rounds of maxima: a warpgroup may be six rounds ahead of the other
  static constexpr int TELLERS = 4, WEIGHT_ROW = KV_ROWS + 8;  // warps that tell maxima of a tile; rows that do not meet in a bank
  static_assert(D % 64 == 0 && KV_ROWS == 128 && CTAS <= 8, "panels are whole, and so are clusters everywhere");

  struct alignas(128) Message {
    unsigned char weights[P_BYTES];
    float rescale[ROWS], highest[ROWS], parts[LANES][ROWS][4];
  };
  static constexpr u32 MESSAGE_SLOT = sizeof(Message), MESSAGE_BYTES = P_BYTES + ROWS * 8 + LANES * ROWS * 16;
  static_assert(MESSAGE_BYTES % 16 == 0, "bulk copies");

  struct Storage {
    unsigned char q[Q_BYTES], k[K_SLOTS][K_BYTES], v[V_SLOTS][V_BYTES];
    Message messages[MESSAGES], drafts[ROUNDS];
    float maxima[TOLD][CTAS][TELLERS][ROWS], weights[GROUPS][ROWS][WEIGHT_ROW], sums[2][WARP];
    u64 k_full[K_SLOTS], k_empty[K_SLOTS], v_full[V_SLOTS], v_empty[V_SLOTS];
    u64 maxima_full[TOLD], message_full[MESSAGES], drafts_read[ROUNDS], round_read[ROUNDS];
  };
  static constexpr int Q = OFFSET_OF(Storage, q), K = OFFSET_OF(Storage, k), V = OFFSET_OF(Storage, v);
  static constexpr int MAXIMA = OFFSET_OF(Storage, maxima), MAXIMA_FULL = OFFSET_OF(Storage, maxima_full);
  static constexpr int WEIGHTS = OFFSET_OF(Storage, weights), SUMS = OFFSET_OF(Storage, sums);  // weights before they are rounded
  static constexpr int ROUND_READ = OFFSET_OF(Storage, round_read);
  static constexpr int RESCALE = OFFSET_OF(Message, rescale), HIGHEST = OFFSET_OF(Message, highest), PARTS = OFFSET_OF(Message, parts);
  static constexpr int SHARED_BYTES = sizeof(Storage);
  static_assert(SHARED_BYTES <= MOST_SHARED_BYTES, "shared memory of one SM");

  using KRing = RingAt<K, K_BYTES, K_SLOTS, OFFSET_OF(Storage, k_full), OFFSET_OF(Storage, k_empty)>;
  using VRing = RingAt<V, V_BYTES, V_SLOTS, OFFSET_OF(Storage, v_full), OFFSET_OF(Storage, v_empty)>;
  using MessageRing = RingAt<OFFSET_OF(Storage, messages), MESSAGE_SLOT, MESSAGES, OFFSET_OF(Storage, message_full), 0>;
  using DraftRing = RingAt<OFFSET_OF(Storage, drafts), MESSAGE_SLOT, ROUNDS, 0, OFFSET_OF(Storage, drafts_read)>;  // a slot per round
};

// The tiles that a unit visits, in rounds of one per CTA.
template <typename C> struct Rounds {
  int visits, last_tile;

  DEVICE Rounds(const Unit& unit) : visits(unit.template visits<C::KV_ROWS>()), last_tile(unit.template last_tile<C::KV_ROWS>()) {}
  DEVICE int first_key(int visit) const { return (last_tile - visit) * C::KV_ROWS; }
  DEVICE int tiles_of(int round) const { return max(0, min(C::CTAS, visits - round * C::CTAS)); }
};

// Barriers that other CTAs know. `turn`: the slot of a round in the ring of drafts.
template <typename C> struct Mail {
  u32 shared;

  DEVICE u32 maxima(int round) const { return shared + C::MAXIMA + round % C::TOLD * (C::CTAS * C::TELLERS * C::ROWS * 4); }
  DEVICE u32 maxima_full(int round) const { return shared + C::MAXIMA_FULL + 8 * (round % C::TOLD); }
  DEVICE void await_maxima(int round) const { mbarrier_wait(maxima_full(round), round / C::TOLD & 1); }
  DEVICE u32 message(u32 slot) const { return shared + C::MessageRing::RING + slot * C::MESSAGE_SLOT; }
  DEVICE u32 message_full(u32 slot) const { return shared + C::MessageRing::FULL + 8 * slot; }
  DEVICE Barrier round_read(u32 turn) const { return {shared + C::ROUND_READ + 8 * turn}; }

  DEVICE void expect_maxima(const Rounds<C>& rounds, int round, int place) const {
    const int tiles = rounds.tiles_of(round);
    if (place < tiles) mbarrier_arrive_expect(maxima_full(round), tiles * C::TELLERS * C::ROWS * 4);
  }
  // Once, by one thread, before the cluster meets.
  DEVICE void init(const Rounds<C>& rounds, int place) const {
    for (int i = 0; i < C::TOLD; i++) mbarrier_init(maxima_full(i), 1);
    for (int i = 0; i < C::ROUNDS; i++) {
      Barrier{shared + C::DraftRing::EMPTY}[i].init(C::CTAS);
      round_read(i).init(4);
    }
    for (int i = 0; i < C::MESSAGES; i++) mbarrier_init(message_full(i), 1);
    mbarrier_init_fence();
    fence_async_all();
    for (int i = 0; i < C::TOLD; i++) expect_maxima(rounds, i, place);
    for (int i = 0; i < min(C::MESSAGES, rounds.visits); i++) mbarrier_arrive_expect(message_full(i), C::MESSAGE_BYTES);
  }
};

// Named barriers. Of scores: Q is there; per warpgroup: weights are written, weights are read.
enum ClusterMeeting { QUERIES = 1, CLEARED = 2, SUMMED = 3, WRITTEN = 4, READ = 6 };

// High words of descriptors. Of V: as many bytes of swizzle as a row has, 8 rows between groups. Of weights: no swizzle, one group.
template <int COLUMNS> constexpr u32 NARROW_ROWS = COLUMNS == 16 ? 0xc0000010u : COLUMNS == 32 ? 0x80000020u : 0x40000040u;
constexpr u32 NOT_SWIZZLED = 0;
// An address in a descriptor. In a cluster, bits 24 and up of a shared address are the CTA's place in it, where descriptors have a stride.
DEVICE u32 matrix_address(u32 shared) { return (shared >> 4) & 0x3fff; }
DEVICE u64 descriptor_of(u32 high, u32 low) { return ((u64)high << 32) | low; }

// What a warp that computes knows.
struct ClusterRole {
  const DecodeParams& p;
  const Unit& unit;
  u32 shared;
  int place, warp, lane;  // warp inside its warpgroup
  u32 base = matrix_address(shared);
};
