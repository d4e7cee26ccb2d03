// Packed sequences: cu_seqlens become sequences, dQ tiles, chains and tickets. The host is not involved.
#pragma once
#include "planning/start_order.cuh"
#include "common/ptx.cuh"

DEVICE int checked_length(const PackedParams& p, int side, int entry) {
  const int *cu = side ? p.cu_k : p.cu_q, tokens = side ? p.k_tokens : p.q_tokens, longest = side ? p.k_longest : p.q_longest;
  const int start = cu[entry], end = cu[entry + 1];
  const bool ends_wrong = (entry == 0 && start != 0) || (entry == p.count - 1 && end != tokens);
  if (ends_wrong || start < 0 || end < start || end > tokens || end - start > longest)
    report_and_trap(p.report, Trouble::BadLengths, p.call, side, entry);
  return end - start;
}

// Q tiles, KV tiles and parts of a group of one sequence. (The forward has no groups.)
template <int Q_ROWS, int KV_ROWS> DEVICE int3 tiles_and_parts(const PackedParams& p, int entry) {
  const int queries = p.cu_q[entry + 1] - p.cu_q[entry], keys = p.cu_k[entry + 1] - p.cu_k[entry];
  return make_int3(tiles_of(queries, Q_ROWS), tiles_of(keys, KV_ROWS), p.split.group > 1 ? parts_of(p.split.group, queries) : 1);
}

// One thread per sequence. Longest sequences start first, so that the last to start are short. A ticket is a chain of a head (backward)
// or a Q tile (forward).
template <int Q_ROWS, int KV_ROWS, bool TICKETS_ARE_CHAINS> __global__ void __launch_bounds__(256)
    packed_layout(const __grid_constant__ PackedParams p) {
  __shared__ int3 tiles[256];
  const int s = blockIdx.x * 256 + threadIdx.x;
  Sequence mine = {};
  if (s < p.count) {
    mine.q_len = checked_length(p, 0, s);
    mine.kv_len = checked_length(p, 1, s);
  }
  const int work = tiles_of(mine.q_len, Q_ROWS) * tiles_of(mine.kv_len, KV_ROWS);
  int first_tile = 0, first_chain = 0, first_ticket = 0, all_tickets = 0, previous = -1, next = -1, less_work = 0, more_work = 0;
  for (int first = 0; first < p.count; first += 256) {
    __syncthreads();
    const int other = first + threadIdx.x;
    if (other < p.count) tiles[threadIdx.x] = tiles_and_parts<Q_ROWS, KV_ROWS>(p, other);
    __syncthreads();
    for (int i = 0; i < min(256, p.count - first); i++) {
      const int3 t = tiles[i];
      const int tickets = TICKETS_ARE_CHAINS ? t.y * p.heads * t.z : t.x, other_work = t.x * t.y;
      if (first + i < s) first_tile += t.x, first_chain += t.y;
      if (other_work > work || (other_work == work && first + i < s)) {
        first_ticket += tickets;
        if (previous < 0 || other_work <= more_work) previous = first + i, more_work = other_work;
      } else if (first + i != s && (next < 0 || other_work > less_work)) {
        next = first + i, less_work = other_work;
      }
      all_tickets += tickets;
    }
  }
  if (s == 0) *p.ticket_count = all_tickets;
  if (s >= p.count) return;
  mine.q_shift = RAGGED - mine.q_len;
  mine.q_plane = p.cu_q[s + 1];
  mine.kv_shift = RAGGED - mine.kv_len;
  mine.kv_plane = p.cu_k[s + 1];
  mine.first_tile = first_tile;
  mine.band_top = band_top(p.mask, mine.q_len, mine.kv_len);
  p.sequences[s] = mine;
  p.starts[s] = {first_tile, first_chain, first_ticket};
  if constexpr (TICKETS_ARE_CHAINS) {
    using Order = SequenceOrder<Q_ROWS, KV_ROWS>;
    const auto order_of = [&](int n) { return Order(p, p.cu_q[n + 1] - p.cu_q[n], p.cu_k[n + 1] - p.cu_k[n]); };
    if (previous >= 0) p.starts[s].shuffled_before = order_of(previous).last_down();
    if (next >= 0) p.starts[s].shuffled_behind = order_of(next).first_up();
  }
}

// The last sequence that begins at `index` or before, in a column of `starts`.
DEVICE int find_sequence(const SequenceStarts* starts, int count, int index, int SequenceStarts::* column) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (starts[middle].*column <= index)
      low = middle;
    else
      high = middle;
  }
  return low;
}

// KV tiles in which a query of this Q tile attends a key.
template <int Q_ROWS, int KV_ROWS> DEVICE int turns_of(const Sequence& s, const MaskParams& mask, int q_tile) {
  const int first = q_tile * Q_ROWS, last = min(first + Q_ROWS, s.q_len) - 1;
  const int low = max(0, first + s.band_top - (int)mask.band_width), high = min(s.kv_len - 1, last + s.band_top);
  return low <= high ? high / KV_ROWS - low / KV_ROWS + 1 : 0;
}

template <int Q_ROWS, int KV_ROWS> struct ChainMaker {
  using Order = SequenceOrder<Q_ROWS, KV_ROWS>;
  const PackedParams& p;
  const Sequence& s;
  const SequenceStarts& starts;
  const Order order;
  int kv_tile, kind;

  DEVICE ChainMaker(const PackedParams& params, int sequence, int tile, int kind_of_head)
      : p(params), s(p.sequences[sequence]), starts(p.starts[sequence]), order(p, s.q_len, s.kv_len), kv_tile(tile), kind(kind_of_head) {}

  DEVICE void make(int at) {
    if (order.ring && kind == 1) return;  // one kind of head only
    PackedChain chain = {};
    chain.kv_tile = kv_tile, chain.kv_tiles = order.kv_tiles, chain.classes = order.classes;
    chain.high = Q_ROWS - 1 + s.band_top, chain.low = s.band_top - (int)p.mask.band_width;
    const int steps = rows_of_chain(chain);
    const Place place = order.ring ? in_ring(chain) : in_classes();
    if (kind == 1) chain.q_first += steps - 1, chain.q_stride = -1;
    p.chains[at] = chain;
    for (int part = 0; part < order.heads; part++)
      if (order.ring)
        write_ticket(part, place, {place_of(part), 1, 0}, at, steps);  // the chains of a gang start together
      else if ((part + p.head_offset * order.parts) % 2 == kind)
        write_ticket(part, place, in_turns(part), at, steps);
  }
  // Where its dK and dV are, and how many parts add to each of its sums.
  DEVICE int4 sum_place(int sequence) const {
    return make_int4(sequence, kv_tile, tiles_of(order.parts, kinds()), order.parts / 2 * (kinds() - 1));
  }

 private:
  DEVICE int kinds() const { return order.ring ? 1 : 2; }

  // Where a chain stands in the order in which the chains of a head start.
  struct Place {
    int first, size, position;  // its segment, its position there
    int gang;                   // most chains of a head that wait for each other in a circle; 1: none do
  };

  // Q tiles the chain visits, and those that need no element mask.
  DEVICE int rows_of_chain(PackedChain& chain) const {
    const int first_key = kv_tile * KV_ROWS, end_key = min(first_key + KV_ROWS, s.kv_len), width = (int)p.mask.band_width;
    const Visits<Q_ROWS, KV_ROWS> visits(kv_tile, s.q_len, s.kv_len, s.band_top, width);
    chain.q_first = visits.first, chain.q_stride = 1;
    chain.full_first = tiles_of(max(0, end_key - s.band_top - 1), Q_ROWS);
    chain.full_end = first_key + KV_ROWS > s.kv_len ? 0 : max(0, min(s.q_len, first_key - s.band_top + width + 1)) / Q_ROWS;
    return visits.count;
  }
  DEVICE Place in_classes() const {
    const int number = kv_tile % order.classes, place = kv_tile / order.classes, size = order.size_of_class(number);
    const int position = kind == 0 ? size - 1 - place : place, first = position / order.piece * order.piece;
    return {(number ? order.size_of_class(0) : 0) + first, min(order.piece, size - first), position - first, 1};
  }
  DEVICE Place in_ring(PackedChain& chain) const {
    const int q_tiles = order.q_tiles, kv_tiles = order.kv_tiles;
    const int blocks = tiles_of(kv_tiles, min(largest_block(q_tiles), kv_tiles));
    const int block = kv_tile * blocks / kv_tiles, first = (block * kv_tiles + blocks - 1) / blocks,
              widest = (kv_tiles + blocks - 1) / blocks;
    chain.ring = q_tiles;
    chain.place = kv_tile - first;
    chain.spacing = (widest - 1) * HAND_OVER < q_tiles ? HAND_OVER : 1;
    chain.members = ((block + 1) * kv_tiles + blocks - 1) / blocks - first;
    chain.turn_first = first;
    chain.q_first = chain.place * chain.spacing % q_tiles;
    return {first, chain.members, chain.place, widest};
  }

  // Where a part stands among those of its kind: the first one of every group, then the second one, and so on; last those that only
  // every second group has. Where parts differ in size: group by group.
  DEVICE int place_of(int number) const {
    if (p.split.group % order.parts != 0) return number / kinds();
    const int kv_head = number / order.parts, in_all = order.parts / kinds(), place = (number - kv_head * order.parts) / kinds();
    return place * p.heads + (place < in_all ? kv_head : kv_head / 2);
  }
  // Heads that start before a head in every segment, heads side by side with it, its place among them.
  struct Lane {
    int before, width, place;
  };
  DEVICE Lane in_turns(int head) const {
    const Dealt mine = kind ? order.down : order.up, other = kind ? order.up : order.down;
    const int index = place_of(head), turn = mine.turn_of(index);
    return {mine.before(turn) + other.before(turn + kind), mine.in(turn), index - mine.before(turn)};
  }

  // Segments one after the other; in a segment heads in the order of their turns, those side by side position by position.
  DEVICE void write_ticket(int number, const Place& place, const Lane& lane, int at, int steps) const {
    const int segment = place.first * order.heads + lane.before * place.size;
    const GroupSplit split{p.split.group, order.parts, kinds(), p.split.sums, p.split.pieces, p.split.first_sum};
    const Part part(split, number);
    const int tile = part.kv_head * p.chain_rows + starts.first_chain + kv_tile;
    ChainRecord record = chain_in(s, split, part, kv_tile * KV_ROWS, p.head_tiles, tile);
    set_walk(record, at, steps, kind);
    record.gang_end = place.gang > 1 ? starts.first_ticket + segment + lane.width * place.size : 0;
    p.tickets[starts.first_ticket + shuffled(segment + place.position * lane.width + lane.place)] = record;
  }
  // The chains that end a sequence walk down and should start one by one; those that begin the next walk up and need not: they
  // are shuffled together, in proportion. `ticket` counts from the first one of this sequence.
  DEVICE int shuffled(u32 ticket) const {
    const u32 up = order.first_up(), down = order.last_down(), before = starts.shuffled_before, behind = starts.shuffled_behind;
    const u32 first_of_down = order.kv_tiles * order.heads - down;
    if (ticket < up && before > 0) return ticket - before + min(before, (ticket * before + up - 1) / up);
    if (ticket >= first_of_down && behind > 0) return ticket + min(behind, (ticket - first_of_down) * behind / down + 1);
    return ticket;
  }
};

// One thread per chain of each kind, and one thread per dQ tile.
template <int Q_ROWS, int KV_ROWS> __global__ void __launch_bounds__(256) packed_plan(const __grid_constant__ PackedParams p) {
  const int thread = blockIdx.x * 256 + threadIdx.x;
  if (thread < p.head_tiles) {
    const int s = find_sequence(p.starts, p.count, thread, &SequenceStarts::first_tile), within = thread - p.starts[s].first_tile;
    const bool exists = within < tiles_of(p.sequences[s].q_len, Q_ROWS);
    p.tile_places[thread] = exists ? make_int2(s, within) : make_int2(-1, 0);
    p.q_turns[thread] = exists ? turns_of<Q_ROWS, KV_ROWS>(p.sequences[s], p.mask, within) : 0;
  }
  if (thread >= 2 * p.chain_rows) return;
  const int kind = thread / p.chain_rows, index = thread - kind * p.chain_rows;
  const int s = find_sequence(p.starts, p.count, index, &SequenceStarts::first_chain), kv_tile = index - p.starts[s].first_chain;
  const bool exists = kv_tile < tiles_of(p.sequences[s].kv_len, KV_ROWS);
  if (exists) {
    ChainMaker<Q_ROWS, KV_ROWS> maker(p, s, kv_tile, kind);
    maker.make(thread);
    if (kind == 0) p.sum_places[index] = maker.sum_place(s);
  } else if (kind == 0) {
    p.sum_places[index] = make_int4(-1, 0, 0, 0);
  }
}
