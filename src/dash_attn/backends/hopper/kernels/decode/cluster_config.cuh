// Attention to a cache where units are fewer than SMs: a cluster of CTAs serves one unit, and no bit changes.
//
// The online softmax goes from KV tile to KV tile, but only its products with V have to. Tile i of a unit (in the order of the visit)
// belongs to CTA i % CTAS, which computes its scores and their maxima. All tell all their maxima, so each knows the maximum before its
// own tile. It then sends everybody a message: weights in 16 bits, the rescale factor, the parts of the row sums. Each CTA owns 16
// columns of V and of the output and goes through all messages in order: row sum, O *= rescale, O += P V, as one CTA would.
// Every byte of K and V is read once, and nothing is recombined.
//
// A unit has 8 rows here. The 64 rows of a product are these 8 again and again: the stride between groups of 8 rows is 0. So a message
// is 8 rows, every warp of a warpgroup has the same results, and one warp does the softmax.
//
// Nobody waits for ever: of two things that a CTA does, the later round waits for earlier rounds only. Messages of round t need those of
// round t - 2 to be read; these need V of that round, which is loaded before K of the next.
#pragma once
#include "common/cluster.cuh"
#include "decode/config.cuh"
#include "decode/softmax.cuh"

template <int D_> struct ClusterConfig {
  static constexpr int D = D_, KV_ROWS = forward_kv_rows(D), ROWS = 8, COLUMNS = 16, CTAS = D / COLUMNS, LANES = sum_lanes(D);
  static constexpr int WARPS = 10, THREADS = WARPS * WARP;  // scores, outputs, loader, and one that tells others what was read
  static constexpr int PANELS = D / 64, KV_PANEL = KV_ROWS * PANEL_ROW, GROUP = ROWS * PANEL_ROW;  // a group: 8 rows of a panel
  static constexpr int Q_BYTES = PANELS * GROUP, K_BYTES = PANELS * KV_PANEL, V_ROW = 2 * COLUMNS, V_BYTES = KV_ROWS * V_ROW;
  static constexpr int P_BYTES = KV_ROWS / 64 * GROUP, SCORES = KV_ROWS / 2, OUTPUTS = COLUMNS / 2;
  static constexpr int K_SLOTS = D == 64 ? 6 : 3, V_SLOTS = 16, MESSAGES = 2 * CTAS;
  static_assert(D % 64 == 0 && KV_ROWS % 64 == 0 && CTAS <= 8, "panels are whole, and so are clusters everywhere");

  struct Message {
    unsigned char weights[P_BYTES];
    float rescale[ROWS], highest[ROWS], parts[LANES][ROWS][4];
  };
  struct alignas(1024) MessageSlot {
    Message message;
  };
  static constexpr u32 MESSAGE_BYTES = sizeof(Message);
  static_assert(MESSAGE_BYTES % 16 == 0, "bulk copies");

  struct Storage {
    unsigned char q[Q_BYTES], k[K_SLOTS][K_BYTES], v[V_SLOTS][V_BYTES];
    MessageSlot messages[MESSAGES], drafts[2];
    float maxima[2][CTAS][ROWS];
    u64 k_full[K_SLOTS], k_empty[K_SLOTS], v_full[V_SLOTS], v_empty[V_SLOTS];
    u64 maxima_full[2], message_full[MESSAGES], drafts_read[2], round_read[2];
  };
  static constexpr int Q = OFFSET_OF(Storage, q), K = OFFSET_OF(Storage, k), V = OFFSET_OF(Storage, v);
  static constexpr int MESSAGE_RING = OFFSET_OF(Storage, messages), DRAFTS = OFFSET_OF(Storage, drafts);
  static constexpr int MAXIMA = OFFSET_OF(Storage, maxima), MAXIMA_FULL = OFFSET_OF(Storage, maxima_full);
  static constexpr int MESSAGE_FULL = OFFSET_OF(Storage, message_full), DRAFTS_READ = OFFSET_OF(Storage, drafts_read);
  static constexpr int ROUND_READ = OFFSET_OF(Storage, round_read);
  static constexpr int RESCALE = OFFSET_OF(Message, rescale), HIGHEST = OFFSET_OF(Message, highest), PARTS = OFFSET_OF(Message, parts);
  static constexpr int SHARED_BYTES = sizeof(Storage);
  static_assert(SHARED_BYTES <= MOST_SHARED_BYTES, "shared memory of one SM");

  struct KRing {
    static constexpr int RING = OFFSET_OF(Storage, k), KV_BYTES = K_BYTES, SLOTS = K_SLOTS, CONSUMER_WARPS = 4;
    static constexpr int FULL = OFFSET_OF(Storage, k_full), EMPTY = OFFSET_OF(Storage, k_empty);
  };
  struct VRing {
    static constexpr int RING = OFFSET_OF(Storage, v), KV_BYTES = V_BYTES, SLOTS = V_SLOTS, CONSUMER_WARPS = 4;
    static constexpr int FULL = OFFSET_OF(Storage, v_full), EMPTY = OFFSET_OF(Storage, v_empty);
  };
};

// The tiles that a unit visits, in rounds of one per CTA.
template <typename C> struct Rounds {
  int visits, last_tile;

  DEVICE Rounds(const Unit& unit) : visits(unit.template visits<C::KV_ROWS>()), last_tile(unit.template last_tile<C::KV_ROWS>()) {}
  DEVICE int first_key(int visit) const { return (last_tile - visit) * C::KV_ROWS; }
  DEVICE int tiles_of(int round) const { return max(0, min(C::CTAS, visits - round * C::CTAS)); }
};

// Barriers that other CTAs know.
template <typename C> struct Mail {
  u32 shared;

  DEVICE u32 maxima(int round) const { return shared + C::MAXIMA + (round & 1) * (C::CTAS * C::ROWS * 4); }
  DEVICE u32 maxima_full(int round) const { return shared + C::MAXIMA_FULL + 8 * (round & 1); }
  DEVICE u32 message(int visit) const { return shared + C::MESSAGE_RING + visit % C::MESSAGES * (u32)sizeof(typename C::MessageSlot); }
  DEVICE u32 message_full(int visit) const { return shared + C::MESSAGE_FULL + 8 * (visit % C::MESSAGES); }
  DEVICE u32 draft(int round) const { return shared + C::DRAFTS + (round & 1) * (u32)sizeof(typename C::MessageSlot); }
  DEVICE u32 draft_read(int round) const { return shared + C::DRAFTS_READ + 8 * (round & 1); }
  DEVICE Barrier round_read(int round) const { return {shared + C::ROUND_READ + 8 * (round & 1)}; }

  DEVICE void expect_maxima(const Rounds<C>& rounds, int round, int rank) const {
    const int tiles = rounds.tiles_of(round);
    if (rank < tiles) mbarrier_arrive_expect(maxima_full(round), tiles * C::ROWS * 4);
  }
  DEVICE void expect_message(const Rounds<C>& rounds, int visit) const {
    if (visit < rounds.visits) mbarrier_arrive_expect(message_full(visit), C::MESSAGE_BYTES);
  }
  // Once, by one thread, before the cluster meets.
  DEVICE void init(const Rounds<C>& rounds, int rank) const {
    for (int i = 0; i < 2; i++) {
      mbarrier_init(maxima_full(i), 1);
      mbarrier_init(draft_read(i), C::CTAS);
      round_read(i).init(4);
    }
    for (int i = 0; i < C::MESSAGES; i++) mbarrier_init(message_full(i), 1);
    mbarrier_init_fence();
    fence_async_all();
    for (int i = 0; i < 2; i++) expect_maxima(rounds, i, rank);
    for (int i = 0; i < C::MESSAGES; i++) expect_message(rounds, i);
  }
};

constexpr u32 ALL_GROUPS_ALIKE = 0x40000000u;  // high word of a descriptor: 128-byte swizzle, 0 bytes between groups of 8 rows
constexpr u32 NARROW_ROWS = 0xc0000010u;       // ... of V: 32-byte swizzle, 256 bytes between groups of 8 rows
DEVICE u64 descriptor_of(u32 high, u32 low) { return ((u64)high << 32) | low; }
