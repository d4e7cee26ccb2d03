// The lowered plan (dash_attn/plan.py): which chain a ticket starts, and how a chain walks.
#pragma once
#include "types.cuh"

struct PlanTables {
  const int* starts;       // [kinds][kv_tiles] start order of a head's KV tiles
  const int* chain_runs;   // [kinds * kv_tiles + 1] first run of each chain
  const int* chain_steps;  // [kinds * kv_tiles] Q tiles each chain visits
  const int4* runs;        // [runs][2] q_first, q_stride, length, rank_mul | rank_add, rank_div, partial, entries
  const int* entries;      // [entries][3] q_tile, rank, partial
  const int* segments;     // [segment_count + 1] first start position of each segment
  int kinds, kv_tiles, lanes, tickets, prefetch_tickets;
  int instances[2];        // heads of each kind over the whole batch
  int heads_per_sequence[2], first_head[2];
};

struct Chain {
  int sequence, kv_head, kv_tile, table;  // table: row of chain_runs and chain_steps
};

// Heads of one kind, in groups of `lanes` side by side: position by position, lane by lane.
DEVICE void side_by_side(int ticket, int positions, int heads, int lanes, int& position, int& instance) {
  const int group = ticket / (lanes * positions), within = ticket - group * lanes * positions;
  const int width = min(lanes, heads - group * lanes);
  position = within / width;
  instance = group * lanes + within - position * width;
}

// The same formula as Placement.tickets: segments, then a surplus of kind 0, rounds of all kinds, a surplus of kind 1.
DEVICE Chain chain_of_ticket(const PlanTables& plan, int ticket) {
  const int all_heads = plan.instances[0] + (plan.kinds == 2 ? plan.instances[1] : 0);
  int segment = 0;
#pragma unroll 1
  while (ticket >= all_heads * plan.segments[segment + 1]) segment++;
  const int first = plan.segments[segment], positions = plan.segments[segment + 1] - first;
  ticket -= all_heads * first;
  int kind = 0, position, instance;
  if (plan.kinds == 1) {
    side_by_side(ticket, positions, all_heads, plan.lanes, position, instance);
  } else {
    const int rounds = min(plan.instances[0], plan.instances[1]) / plan.lanes;
    const int surplus = plan.instances[0] - rounds * plan.lanes, in_turn = plan.lanes * positions;
    if (ticket < surplus * positions) {
      side_by_side(ticket, positions, surplus, plan.lanes, position, instance);
    } else if ((ticket -= surplus * positions) < rounds * 2 * in_turn) {
      const int turn = ticket / in_turn, within = ticket - turn * in_turn;
      kind = turn & 1;
      position = within / plan.lanes;
      instance = (turn >> 1) * plan.lanes + within - position * plan.lanes + (kind ? 0 : surplus);
    } else {
      kind = 1;
      ticket -= rounds * 2 * in_turn;
      side_by_side(ticket, positions, plan.instances[1] - rounds * plan.lanes, plan.lanes, position, instance);
      instance += rounds * plan.lanes;
    }
  }
  Chain chain;
  const int per_sequence = plan.heads_per_sequence[kind];
  chain.sequence = instance / per_sequence;
  chain.kv_head = plan.first_head[kind] + plan.kinds * (instance - chain.sequence * per_sequence);
  chain.kv_tile = plan.starts[kind * plan.kv_tiles + first + position];
  chain.table = kind * plan.kv_tiles + chain.kv_tile;
  return chain;
}

struct Step {
  int q_tile, rank, partial;
};

// Walks the runs of one chain. Runs are read anew for every step: registers are scarcer than cached loads.
struct Walk {
  int run, at = 0;  // current run, step inside it

  DEVICE Walk(const PlanTables& plan, int table) : run(plan.chain_runs[table]) {}
  DEVICE Step next(const PlanTables& plan) {
    int4 line = plan.runs[2 * run];
    if (at == line.z) {
      run++;
      at = 0;
      line = plan.runs[2 * run];
    }
    const int4 rest = plan.runs[2 * run + 1];
    const int i = at++;
    if (rest.w >= 0) {
      const int* entry = plan.entries + 3 * (rest.w + i);
      return {entry[0], entry[1], entry[2]};
    }
    // Ranks lie on a digital line; the numerator is never negative (ranks are not), so C division rounds down.
    return {line.x + i * line.y, (line.w * i + rest.x) / rest.y, rest.z};
  }
};
