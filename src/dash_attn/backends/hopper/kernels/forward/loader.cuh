// Warps of the forward that bring and take tiles.
#pragma once
#include "forward/config.cuh"
#include "common/modifiers.cuh"

// One thread: takes Q tiles by ticket and loads Q, K and V by TMA.
template <typename V> struct ForwardLoader : ForwardRole {
  using C = typename V::C;
  static constexpr bool PACKED = V::PACKED;

  DEVICE void run() {
    u32 loads = 0;  // KV tiles so far
    int2 next = take_ticket();
    for (u32 tiles = 0;; tiles++) {
      if constexpr (V::DROPOUT || V::ALIBI) announce_modifiers(next, tiles);
      const TileNote tile = describe(next);
      announce(tile, tiles);
      if (tile.visits < 0) return;
      load_q(tiles, tile);
      if constexpr (PACKED) {
        const PackedTile& entry = p.tiles[next.y];
        const Sequence& sequence = p.sequences[entry.sequence];
        next = load_visits(PackedVisits(entry), tile, sequence.kv_shift, sequence.kv_plane, loads);
      } else {
        next = load_visits(TableVisits(p.visits, next.y), tile, 0, tile.q_plane, loads);
      }
    }
  }

 private:
  // The next (head of the batch, Q tile), or -1. Groups of heads whose K and V stay in the L2 cache, and another at the
  // end; in a group longest Q tiles first, heads innermost. Packed sequences: entry of p.tiles instead of a Q tile.
  DEVICE int2 take_ticket() {
    int ticket = (int)atomicInc(p.next_ticket, p.last_ticket);
    const int places = PACKED ? (int)p.next_ticket[1] : p.places, heads = p.batch * p.q_heads;
    if (ticket >= heads * places) return make_int2(-1, 0);
    int first = 0, end = heads - p.last_heads, side = p.heads_side_by_side;
    if (ticket >= end * places) {
      ticket -= end * places;
      first = end;
      end = heads;
      side = p.last_heads;
    }
    const int group = ticket / (side * places), within = ticket - group * side * places;
    first += group * side;
    const int width = min(side, end - first), place = within / width;
    return make_int2(first + within - place * width, PACKED ? place : p.visits.q_order[place]);
  }

  DEVICE TileNote describe(int2 ticket) {
    if (ticket.x < 0) return {-1};
    if constexpr (PACKED) {
      const PackedTile& entry = p.tiles[ticket.y];
      const Sequence& s = p.sequences[entry.sequence];
      return {entry.visits,
              ticket.x,
              entry.q_tile * C::Q_ROWS,
              s.q_shift,
              s.q_plane,
              s.q_len,
              s.kv_len,
              ticket.x * p.tokens + s.q_plane - s.q_len};
    }
    const int sequence = ticket.x / p.q_heads, head = ticket.x - sequence * p.q_heads;
    return {p.visits.visits[ticket.y], head, ticket.y * C::Q_ROWS, 0, sequence, p.mask.q_len, p.mask.kv_len, ticket.x * p.mask.q_len};
  }

  DEVICE void announce(const TileNote& tile, u32 tiles) {
    const u32 slot = tiles & 1, at = shared + C::TILE_NOTES + (u32)sizeof(TileNote) * slot;
    bars.tile_empty(slot).wait(((tiles >> 1) & 1) ^ 1);
    store_shared_i32x4(at, make_int4(tile.visits, tile.q_head, tile.query, tile.q_shift));
    store_shared_i32x4(at + 16, make_int4(tile.q_plane, tile.q_len, tile.kv_len, tile.lse_at));
    bars.tile_full(slot).arrive();
  }
  // Before the tile itself, of which registers would have to be kept meanwhile.
  DEVICE void announce_modifiers(int2 ticket, u32 tiles) {
    if (ticket.x < 0) return;
    const int sequence = PACKED ? p.tiles[ticket.y].sequence : ticket.x / p.q_heads, head = PACKED ? ticket.x : ticket.x % p.q_heads;
    const int more_keys = PACKED ? p.sequences[sequence].kv_len - p.sequences[sequence].q_len : p.mask.kv_len - p.mask.q_len;
    const u64 key = m->seeds == nullptr ? 0 : dropout_key(*m, sequence, head);
    const int slope = __float_as_int(slope_of(*m, sequence, head));
    bars.tile_empty(tiles & 1).wait(((tiles >> 1) & 1) ^ 1);
    store_shared_i32x4(shared + C::SHARED_BYTES + (tiles & 1) * MODIFIER_NOTE_BYTES,
                       make_int4((int)(u32)key, (int)(u32)(key >> 32), slope, more_keys));
  }

  DEVICE void load_q(u32 number, const TileNote& tile) {
    const u32 s = C::Q_STAGES == 2 ? number & 1 : 0, phase = (C::Q_STAGES == 2 ? number >> 1 : number) & 1;
    const Barrier full = bars.q_full(s);
    bars.q_empty(s).wait(phase ^ 1);
    full.arrive_expect(C::Q_BYTES);
    for (int half = 0; half < C::CONSUMERS; half++)
      for (int i = 0; i < C::PANELS; i++)
        tma_load<PACKED>(shared + C::Q + s * C::Q_BYTES + half * C::HALF_BYTES + i * C::PANEL, maps.q, full.address, i * 64, tile.q_head,
                         tile.query + tile.q_shift + half * 64, tile.q_plane);
  }

  // Loads what a tile visits and takes the ticket of the next one meanwhile.
  template <typename Visits> DEVICE int2 load_visits(Visits visits, const TileNote& tile, int kv_shift, int kv_plane, u32& loads) {
    const int kv_head = tile.q_head / p.group;
    // Late, so that who ends first takes the longest tile that is left; two visits are on their way, behind which its latency hides.
    const int ticket_at = max(1, tile.visits - 2);
    int2 next;
    int row = 0;
    // K comes one visit ahead of V. A V waits for an output, which is finished late; no K must wait behind it.
#pragma unroll 1
    for (int j = 0; j <= tile.visits; j++) {
      const int row_before = row;
      if (j < tile.visits) {
        const u32 load = loads + j, stage = load & 1;
        visits.next();
        row = visits.kv_tile * C::KV_ROWS + kv_shift;
        if constexpr (V::MASK == MaskKind::Bits) {
          const VisitNote note = note_of_bits(visits.kv_tile, visits.partial, tile);  // a look-up, not behind the wait
          await_empty(bars.k_empty(stage), load);
          store_shared_i32(shared + C::VISIT_NOTES + 4 * stage, note.word);
        } else {
          await_empty(bars.k_empty(stage), load);
          store_shared_i32(shared + C::VISIT_NOTES + 4 * stage, VisitNote::pack(visits.kv_tile, visits.partial).word);
        }
        load_tile<C::PANELS>(C::K + stage * C::K_BYTES, maps.k, bars.k_full(stage), kv_head, row, kv_plane);
      }
      if (j > 0) {
        const u32 load = loads + j - 1, stage = load & 1;
        await_empty(bars.v_empty(stage), load);
        load_tile<C::V_PANELS>(C::V + stage * C::V_BYTES, maps.v, bars.v_full(stage), kv_head, row_before, kv_plane);
      }
      if (j == ticket_at) next = take_ticket();
    }
    if (tile.visits == 0) next = take_ticket();
    loads += tile.visits;
    return next;
  }
  DEVICE VisitNote note_of_bits(int kv_tile, bool partial, const TileNote& tile) {
    return {partial ? BitTables::note(BitTables{p.mask}.number(tile.query / C::Q_ROWS, kv_tile, tile.q_plane, tile.q_head)) : 0};
  }
  DEVICE void await_empty(Barrier empty, u32 number) { empty.wait(((number >> 1) & 1) ^ 1); }
  template <int PANELS> DEVICE void load_tile(u32 at, const TensorMap* map, Barrier full, int kv_head, int row, int plane) {
    full.arrive_expect(PANELS * C::KV_PANEL);
    for (int i = 0; i < PANELS; i++) tma_load<PACKED>(shared + at + i * C::KV_PANEL, map, full.address, i * 64, kv_head, row, plane);
  }
};

// One warp per consumer: stores its outputs by TMA, so that the consumer need not wait for them.
template <typename V> struct ForwardStorer : ForwardRole {
  using C = typename V::C;
  int wg, lane;

  DEVICE void run() {
    tell_room();
    for (u32 tiles = 0;; tiles++) {
      const u32 slot = tiles & 1;
      bars.tile_full(slot).wait((tiles >> 1) & 1);
      const TileNote tile = note_of_tile<C>(shared, slot);
      if (tile.visits < 0) break;
      arrive_as_warp(bars.tile_empty(slot), lane);
      named_barrier_sync(OUTPUT + wg, WARPGROUP + WARP);
      if (lane == 0) {
        for (int i = 0; i < C::V_PANELS; i++)
          tma_store<V::PACKED>(maps.out, shared + C::OUT + wg * C::OUT_HALF + i * C::PANEL, i * 64, tile.q_head,
                               tile.query + tile.q_shift + wg * 64, tile.q_plane);
        bulk_commit();
        bulk_wait_read();
      }
      __syncwarp();
      if constexpr (C::OUT_OVER_Q)
        arrive_as_warp(bars.q_empty(0), lane);
      else
        tell_room();
    }
    if (lane == 0) bulk_wait();
  }

 private:
  DEVICE void tell_room() {
    if constexpr (!C::OUT_OVER_Q) named_barrier_arrive(ROOM + wg, WARPGROUP + WARP);
  }
};
