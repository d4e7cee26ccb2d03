// The lowered plan (scheduling/plan.py): which chain a ticket starts, and how a chain walks.
// The preprocess kernel expands tickets; the planner of the backward kernel, short of registers, only reads the result.
#pragma once
#include "common/sequence.cuh"

struct Chain {
  int sequence, part, kv_tile, table;     // table: row of chain_runs and chain_steps
  int group_end;                          // ticket after the last chain of the heads that start side by side with this one
};

// Heads of one kind, dealt to rounds or turns: as many to each as to any other, or one more to the first ones.
struct Dealt {
  int each, more;  // more: turns that have one more
  static DEVICE Dealt to(int turns, int heads) { return {heads / turns, heads % turns}; }
  DEVICE int before(int turn) const { return turn * each + min(turn, more); }
  DEVICE int in(int turn) const { return each + (turn < more); }
  DEVICE int turn_of(int head) const { return head < more * (each + 1) ? head / (each + 1) : more + (head - more * (each + 1)) / each; }
};

// Heads of both kinds, those that walk up first in each turn.
struct DealtKinds {
  Dealt up, down;
  DEVICE int before(int turn) const { return up.before(turn) + down.before(turn); }
  // The first turns have one more of both kinds, the next ones one more of one kind.
  DEVICE int turn_of(int head) const {
    const int each = up.each + down.each, twice = min(up.more, down.more), in_first = twice * (each + 2);
    return head < in_first ? head / (each + 2) : twice + Dealt{each, max(up.more, down.more) - twice}.turn_of(head - in_first);
  }
};

// Which sequence and part a head of a kind is, as Placement._instances: the first part of every group, then the second one, and so on;
// last those that only every second group has. Where parts differ in size: sequence by sequence, group by group.
DEVICE void set_part(Chain& chain, const PlanTables& plan, int kind, int instance) {
  const int parts = plan.split.parts, in_all = parts / plan.kinds, with_more = plan.groups_with_more[kind];
  const int first_with_more = plan.first_with_more[kind];
  if (plan.split.group % parts != 0) {
    const int per_sequence = plan.kv_heads * in_all + with_more, first = plan.kinds == 1 ? 0 : parts & 1 ? first_with_more : kind;
    chain.sequence = instance / per_sequence;
    chain.part = first + plan.kinds * (instance - chain.sequence * per_sequence);
    return;
  }
  int place = instance / plan.groups, kv_head;
  if (place < in_all) {
    const int group = instance - place * plan.groups;
    chain.sequence = group / plan.kv_heads;
    kv_head = group - chain.sequence * plan.kv_heads;
  } else {
    const int left = instance - in_all * plan.groups;
    place = in_all;
    chain.sequence = left / with_more;
    kv_head = first_with_more + 2 * (left - chain.sequence * with_more);
  }
  const int first = plan.kinds == 1 ? 0 : parts & 1 ? (kv_head + first_with_more) & 1 : kind;
  chain.part = kv_head * parts + plan.kinds * place + first;
}

// The same formula as Placement.tickets: rounds, segments, turns of all kinds; in a turn position by position, head by head.
DEVICE Chain chain_of_ticket(const PlanTables& plan, const int number) {
  int ticket = number;
  const DealtKinds rounds{Dealt::to(plan.rounds, plan.instances[0]), Dealt::to(plan.rounds, plan.instances[1])};
  const int round = rounds.turn_of(ticket / plan.kv_tiles), up = rounds.up.in(round), down = rounds.down.in(round);
  ticket -= plan.kv_tiles * rounds.before(round);
  int segment = 0;
#pragma unroll 1
  while (ticket >= (up + down) * plan.segments[segment + 1]) segment++;
  const int first = plan.segments[segment], positions = plan.segments[segment + 1] - first;
  ticket -= (up + down) * first;
  const int count = (max(up, down) + plan.lanes - 1) / plan.lanes;
  const DealtKinds turns{Dealt::to(count, up), Dealt::to(count, down)};
  const int turn = turns.turn_of(ticket / positions);
  ticket -= positions * turns.before(turn);
  const int kind = ticket >= positions * turns.up.in(turn);
  if (kind) ticket -= positions * turns.up.in(turn);
  const Dealt in_round = kind ? rounds.down : rounds.up, in_turn = kind ? turns.down : turns.up;
  const int width = in_turn.in(turn);
  const int position = ticket / width, left = width * positions - ticket;
  const int instance = in_round.before(round) + in_turn.before(turn) + ticket - position * width;
  Chain chain;
  set_part(chain, plan, kind, instance);
  chain.kv_tile = plan.starts[kind * plan.kv_tiles + first + position];
  chain.table = kind * plan.kv_tiles + chain.kv_tile;
  chain.group_end = number + left;
  return chain;
}

// Into how many parts a group is split, as parts_of in scheduling/problem.py.
DEVICE int parts_of(int group, int q_len) {
  const int most = max(1, ROWS_OF_A_CHAIN / max(1, q_len));
  return (group + most - 1) / most;
}

// A part of a group, by its number in a sequence: its KV head and its query heads.
struct Part {
  int kv_head, place, q_head, members;
  DEVICE Part(const GroupSplit& split, int number) {
    kv_head = number / split.parts, place = number - kv_head * split.parts;
    const int each = split.group / split.parts, shorter = split.parts - split.group % split.parts;  // the last parts have one more
    q_head = kv_head * split.group + place * each + max(0, place - shorter), members = each + (place >= shorter);
  }
};

// What a chain of any plan has in common: its rows, its dQ tiles, where its dK and dV are added. head_tiles: dQ tiles between a query
// head and the next. kv_tile: its number among those of all heads and sequences.
DEVICE ChainRecord chain_in(const Sequence& sequence, const GroupSplit& split, const Part& part, int first_key, int head_tiles,
                            int kv_tile) {
  ChainRecord chain;
  chain.kv_head = part.kv_head;
  chain.kv_row = first_key + sequence.kv_shift;
  chain.kv_plane = sequence.kv_plane;
  chain.q_shift = sequence.q_shift;
  chain.q_plane = sequence.q_plane;
  chain.keys = sequence.kv_len - first_key;
  chain.band_top = sequence.band_top - first_key;
  chain.q_head = part.q_head;
  chain.members = part.members;
  chain.first_dq_tile = sequence.first_tile + part.q_head * head_tiles;
  const int turn = part.place / split.kinds, sum = part.place - turn * split.kinds;
  chain.first_sum = split.first_sum + (kv_tile * split.sums + sum) * split.pieces;
  chain.turn = turn;
  return chain;
}
// ... and how it walks: `steps` of one query head.
DEVICE void set_walk(ChainRecord& chain, int first_run, int steps, int last_member_first) {
  chain.steps = chain.members * steps;
  chain.first_run = first_run;
  chain.walk = 2 * steps + last_member_first;
}

DEVICE ChainRecord expand_chain(const PlanTables& plan, const Chain& chain, const Sequence& sequence, int kv_rows, int kv_heads,
                                int head_tiles) {
  const Part part(plan.split, chain.part);
  const int kv_tile = (chain.sequence * kv_heads + part.kv_head) * plan.kv_tiles + chain.kv_tile;
  ChainRecord record = chain_in(sequence, plan.split, part, chain.kv_tile * kv_rows, head_tiles, kv_tile);
  set_walk(record, plan.chain_runs[chain.table], plan.chain_steps[chain.table], plan.last_member_first[chain.table / plan.kv_tiles]);
  record.gang_end = plan.has_gangs ? chain.group_end : 0;
  return record;
}

// One load after the other: the compiler would fetch whole rows at once, for which the planner has no registers.
DEVICE int read(const int& field) {
  int v;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(v) : "l"(&field));
  return v;
}

// Walks the runs of one chain.
struct Walk {
  int run, at = 0;  // current run, step inside it

  DEVICE Walk(int first_run) : run(first_run) {}
  DEVICE Step next(const Run* runs, const Step* entries) {
    if (at == read(runs[run].length)) {
      run++;
      at = 0;
    }
    const Run& line = runs[run];
    const int i = at++, listed = read(line.entries);
    if (listed >= 0) {
      const Step& entry = entries[listed + i];
      return {read(entry.q_tile), read(entry.turn), read(entry.partial)};
    }
    // Turns lie on a digital line; the numerator is never negative, because turns are not.
    const u32 turn = (u32)(read(line.turn_mul) * i + read(line.turn_add)) / (u32)read(line.turn_div);
    return {read(line.q_first) + i * read(line.q_stride), (int)turn, read(line.partial)};
  }
};
