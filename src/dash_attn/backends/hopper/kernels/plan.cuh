// The lowered plan (dash_attn/plan.py): which chain a ticket starts, and how a chain walks.
// The preprocess kernel expands tickets; the planner of the backward kernel, short of registers, only reads the result.
#pragma once
#include "sequence.cuh"

struct Run;   // a stretch of a walk
struct Step;  // one entry of an irregular walk

struct PlanTables {
  const int* starts;       // [kinds][kv_tiles] start order of a head's KV tiles
  const int* chain_runs;   // [kinds * kv_tiles + 1] first run of each chain
  const int* chain_steps;  // [kinds * kv_tiles] Q tiles each chain visits
  const Run* runs;
  const Step* entries;
  const int* segments;     // [segment_count + 1] first start position of each segment
  int kinds, kv_tiles, lanes, tickets, has_gangs;
  int rounds, heads_in_round;  // full rounds; heads of each kind in one
  int instances[2];        // heads of each kind over the whole batch
  int heads_per_sequence[2], first_head[2], last_member_first[2];  // per kind
};

struct Chain {
  int sequence, kv_head, kv_tile, table;  // table: row of chain_runs and chain_steps
  int group_end;                          // ticket behind the last chain of the heads that start side by side with this one
};

// What a ticket stands for. The first eight words are the chain's note to all roles (ChainNote in backward_config.cuh).
struct alignas(16) Ticket {
  int kv_head, kv_row, kv_plane, steps;  // steps: of all query heads of the group
  int q_shift, q_plane, keys, band_top;
  int first_run, first_dq_tile;
  int gang_end;           // ticket behind the last chain that may wait for this one in a circle; 0 without gangs
  int walk;               // steps of one query head, times two; plus 1 if the last query head of the group is walked first
};

// Heads of one kind, in groups of `lanes` side by side: position by position, lane by lane.
DEVICE void side_by_side(int ticket, int positions, int heads, int lanes, int& position, int& instance, int& left) {
  const int group = ticket / (lanes * positions), within = ticket - group * lanes * positions;
  const int width = min(lanes, heads - group * lanes);
  position = within / width;
  instance = group * lanes + within - position * width;
  left = width * positions - within;
}

// The same formula as Placement.tickets: rounds, segments, then a surplus of kind 0, turns of all kinds, a surplus of kind 1.
DEVICE Chain chain_of_ticket(const PlanTables& plan, const int number) {
  int ticket = number;
  const int in_round = plan.kinds * plan.heads_in_round * plan.kv_tiles, round = plan.rounds == 0 ? 0 : min(ticket / in_round, plan.rounds);
  ticket -= round * in_round;
  const int before = round * plan.heads_in_round, most = round < plan.rounds ? plan.heads_in_round : 1 << 30;
  const int heads[2] = {min(plan.instances[0] - before, most), min(plan.instances[1] - before, most)};
  const int all_heads = heads[0] + (plan.kinds == 2 ? heads[1] : 0);
  int segment = 0;
#pragma unroll 1
  while (ticket >= all_heads * plan.segments[segment + 1]) segment++;
  const int first = plan.segments[segment], positions = plan.segments[segment + 1] - first;
  ticket -= all_heads * first;
  int kind = 0, position, instance, left;
  if (plan.kinds == 1) {
    side_by_side(ticket, positions, all_heads, plan.lanes, position, instance, left);
  } else {
    const int turns = min(heads[0], heads[1]) / plan.lanes;
    const int surplus = heads[0] - turns * plan.lanes, in_turn = plan.lanes * positions;
    if (ticket < surplus * positions) {
      side_by_side(ticket, positions, surplus, plan.lanes, position, instance, left);
    } else if ((ticket -= surplus * positions) < turns * 2 * in_turn) {
      const int turn = ticket / in_turn, within = ticket - turn * in_turn;
      kind = turn & 1;
      position = within / plan.lanes;
      instance = (turn >> 1) * plan.lanes + within - position * plan.lanes + (kind ? 0 : surplus);
      left = in_turn - within;
    } else {
      kind = 1;
      ticket -= turns * 2 * in_turn;
      side_by_side(ticket, positions, heads[1] - turns * plan.lanes, plan.lanes, position, instance, left);
      instance += turns * plan.lanes;
    }
  }
  instance += before;
  Chain chain;
  const int per_sequence = plan.heads_per_sequence[kind];
  chain.sequence = instance / per_sequence;
  chain.kv_head = plan.first_head[kind] + plan.kinds * (instance - chain.sequence * per_sequence);
  chain.kv_tile = plan.starts[kind * plan.kv_tiles + first + position];
  chain.table = kind * plan.kv_tiles + chain.kv_tile;
  chain.group_end = number + left;
  return chain;
}

// head_tiles: dQ tiles between a query head and the next.
DEVICE Ticket expand_chain(const PlanTables& plan, const Chain& chain, const Sequence& sequence, int kv_rows, int group, int head_tiles) {
  const int first_key = chain.kv_tile * kv_rows, steps = plan.chain_steps[chain.table];
  return {chain.kv_head, first_key + sequence.kv_shift, sequence.kv_plane, group * steps,
          sequence.q_shift, sequence.q_plane, sequence.kv_len - first_key, sequence.band_top - first_key,
          plan.chain_runs[chain.table], sequence.first_tile + chain.kv_head * group * head_tiles,
          plan.has_gangs ? chain.group_end : 0, 2 * steps + plan.last_member_first[chain.table / plan.kv_tiles]};
}

struct Step {
  int q_tile, rank, partial;
};

// A row of the run table (RUN_FIELDS in plan.py).
struct Run {
  int q_first, q_stride, length, rank_mul, rank_add, rank_div, partial, entries;
};

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
      return {read(entry.q_tile), read(entry.rank), read(entry.partial)};
    }
    // Ranks lie on a digital line; the numerator is never negative, because ranks are not.
    const u32 rank = (u32)(read(line.rank_mul) * i + read(line.rank_add)) / (u32)read(line.rank_div);
    return {read(line.q_first) + i * read(line.q_stride), (int)rank, read(line.partial)};
  }
};
