// The device's planning code as a host library, for tests/backends/test_device_formulas.py.
#include "planning/chains.cuh"
#include "fibers.h"

constexpr int PIECES = 4, FIRST_SUM = 1000;
static PackedParams params;
static std::vector<Sequence> sequences;
static std::vector<SequenceStarts> starts;
static std::vector<int2> tile_places;
static std::vector<int> q_turns;
static std::vector<PackedChain> chains;
static std::vector<ChainRecord> tickets;
static std::vector<int4> sum_places;
static int ticket_count;

template <int Q_ROWS, int KV_ROWS> static int plan_with() {
  for (int block = 0; block * THREADS < params.count; block++) run_block(block, [] { packed_layout<Q_ROWS, KV_ROWS, true>(params); });
  const int threads = max(params.head_tiles, 2 * params.chain_rows);
  for (int block = 0; block * THREADS < threads; block++) run_block(block, [] { packed_plan<Q_ROWS, KV_ROWS>(params); });
  return ticket_count;
}

extern "C" {
// Plans packed sequences; how many tickets there are.
int plan(int q_rows, int kv_rows, const int* cu_q, const int* cu_k, int count, int heads, int group, int head_offset, int workers, int right, u32 width) {
  params = {};
  params.cu_q = cu_q, params.cu_k = cu_k, params.count = count;
  params.q_tokens = cu_q[count], params.k_tokens = cu_k[count], params.q_longest = params.k_longest = 1 << 30;
  params.heads = heads, params.head_offset = head_offset, params.workers = workers;
  params.head_tiles = params.q_tokens / q_rows + count, params.chain_rows = params.k_tokens / kv_rows + count;
  params.split = {group, -1, 2, group > 1 ? 2 : 0, PIECES, FIRST_SUM};
  params.mask.band_right = right, params.mask.band_width = width;
  sequences.assign(count, {});
  starts.assign(count, {});
  tile_places.assign(params.head_tiles, {});
  q_turns.assign(params.head_tiles, -1);
  chains.assign(2 * params.chain_rows, {});
  tickets.assign((size_t)params.chain_rows * heads * group, {-1});
  sum_places.assign(params.chain_rows, {-7, -7, -7, -7});
  params.sequences = sequences.data(), params.starts = starts.data(), params.tile_places = tile_places.data(), params.q_turns = q_turns.data();
  params.chains = chains.data(), params.tickets = tickets.data(), params.ticket_count = &ticket_count;
  params.sum_places = sum_places.data();
  if (q_rows == 64 && kv_rows == 128) return plan_with<64, 128>();
  if (q_rows == 128 && kv_rows == 128) return plan_with<128, 128>();
  return plan_with<64, 64>();
}
// Of every ticket: KV head, end of the sequence, keys from the chain's first one on, first query head, how many, whether the last one
// is walked first, where dK and dV are added (less FIRST_SUM) and when.
void read_tickets(int* out) {
  for (int i = 0; i < ticket_count; i++) {
    const ChainRecord& t = tickets[i];
    const int fields[8] = {t.kv_head, t.kv_plane, t.keys, t.q_head, t.members, t.walk & 1, t.first_sum - FIRST_SUM, t.turn};
    memcpy(out + 8 * i, fields, sizeof(fields));
  }
}
// Of every row of a head: sequence, KV tile, parts that add to its first and its second sum. How many rows there are.
int read_sum_places(int* out) {
  memcpy(out, sum_places.data(), sizeof(int4) * sum_places.size());
  return sum_places.size();
}
int parts_of_group(int group, int q_len) { return parts_of(group, q_len); }
// Steps of one query head, and (Q tile, turn) of each.
int read_walk(int q_rows, int kv_rows, int ticket, int* out) {
  const int steps = tickets[ticket].walk >> 1;
  const PackedChain& chain = chains[tickets[ticket].first_run];
  for (int i = 0; i < steps; i++) {
    const Step step = kv_rows == 64    ? PackedWalk<64, 64>::step(chain, i)
                      : q_rows == 128 ? PackedWalk<128, 128>::step(chain, i)
                                      : PackedWalk<64, 128>::step(chain, i);
    out[2 * i] = step.q_tile, out[2 * i + 1] = step.turn;
  }
  return steps;
}
// Ranks of the Q tiles of a sequence.
void read_turns(int sequence, int q_tiles, int* out) { memcpy(out, &q_turns[starts[sequence].first_tile], 4 * q_tiles); }
// (sequence, part, KV tile) of every ticket of a plan that was made on the host.
void expand(const PlanTables* plan, int* out) {
  for (int i = 0; i < plan->tickets; i++) {
    const Chain chain = chain_of_ticket(*plan, i);
    out[3 * i] = chain.sequence, out[3 * i + 1] = chain.part, out[3 * i + 2] = chain.kv_tile;
  }
}
// (KV head, first query head, how many, first sum, turn) of a chain of such a plan.
void part_of_chain(const PlanTables* plan, int kv_heads, int sequence, int number, int kv_tile, int* out) {
  const Part part(plan->split, number);
  const ChainRecord record = chain_in(Sequence{}, plan->split, part, 0, 1, (sequence * kv_heads + part.kv_head) * plan->kv_tiles + kv_tile);
  const int fields[5] = {record.kv_head, record.q_head, record.members, record.first_sum, record.turn};
  memcpy(out, fields, sizeof(fields));
}
}
