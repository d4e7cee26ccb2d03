// The device's planning code as a host library, for tests/backends/test_device_formulas.py.
#include "device_planning/chains.cuh"
#include <ucontext.h>

constexpr int THREADS = 256, STACK = 65536;
Index blockIdx, threadIdx;
static ucontext_t scheduler, fibers[THREADS];
static std::vector<char> stacks(THREADS* STACK);
static bool ended[THREADS];
static void (*kernel)();

void __syncthreads() { swapcontext(&fibers[threadIdx.x], &scheduler); }
static void run_thread() {
  kernel();
  ended[threadIdx.x] = true;
  swapcontext(&fibers[threadIdx.x], &scheduler);
}
static void run_block(int block, void (*what)()) {
  blockIdx.x = block;
  kernel = what;
  for (int t = 0; t < THREADS; t++) {
    getcontext(&fibers[t]);
    fibers[t].uc_stack.ss_sp = &stacks[t * STACK];
    fibers[t].uc_stack.ss_size = STACK;
    fibers[t].uc_link = nullptr;
    makecontext(&fibers[t], run_thread, 0);
    ended[t] = false;
  }
  for (bool some_run = true; some_run;) {
    some_run = false;
    for (int t = 0; t < THREADS; t++) {
      if (ended[t]) continue;
      some_run = true;
      threadIdx.x = t;
      swapcontext(&scheduler, &fibers[t]);
    }
  }
}

static PackedParams params;
static std::vector<Sequence> sequences;
static std::vector<SequenceStarts> parts;
static std::vector<int2> tile_places;
static std::vector<int> q_ranks;
static std::vector<PackedChain> chains;
static std::vector<ChainRecord> tickets;
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
  params.heads = heads, params.group = group, params.head_offset = head_offset, params.workers = workers;
  params.head_tiles = params.q_tokens / q_rows + count, params.chain_rows = params.k_tokens / kv_rows + count;
  params.mask.band_right = right, params.mask.band_width = width;
  sequences.assign(count, {});
  parts.assign(count, {});
  tile_places.assign(params.head_tiles, {});
  q_ranks.assign(params.head_tiles, -1);
  chains.assign(2 * params.chain_rows, {});
  tickets.assign((size_t)params.chain_rows * heads, {-1});
  params.sequences = sequences.data(), params.parts = parts.data(), params.tile_places = tile_places.data(), params.q_ranks = q_ranks.data();
  params.chains = chains.data(), params.tickets = tickets.data(), params.ticket_count = &ticket_count;
  if (q_rows == 64 && kv_rows == 128) return plan_with<64, 128>();
  if (q_rows == 128 && kv_rows == 128) return plan_with<128, 128>();
  return plan_with<64, 64>();
}
// KV head, end of the sequence, keys from the chain's first one on; of every ticket.
void read_tickets(int* out) {
  for (int i = 0; i < ticket_count; i++) out[3 * i] = tickets[i].kv_head, out[3 * i + 1] = tickets[i].kv_plane, out[3 * i + 2] = tickets[i].keys;
}
// Steps of one query head, and (Q tile, rank) of each.
int read_walk(int q_rows, int kv_rows, int ticket, int* out) {
  const int steps = tickets[ticket].walk >> 1;
  const PackedChain& chain = chains[tickets[ticket].first_run];
  for (int i = 0; i < steps; i++) {
    const Step step = kv_rows == 64    ? PackedWalk<64, 64>::step(chain, i)
                      : q_rows == 128 ? PackedWalk<128, 128>::step(chain, i)
                                      : PackedWalk<64, 128>::step(chain, i);
    out[2 * i] = step.q_tile, out[2 * i + 1] = step.rank;
  }
  return steps;
}
// Ranks of the Q tiles of a sequence.
void read_ranks(int sequence, int q_tiles, int* out) { memcpy(out, &q_ranks[parts[sequence].first_tile], 4 * q_tiles); }
// (sequence, KV head, KV tile) of every ticket of a plan that was made on the host.
void expand(const PlanTables* plan, int* out) {
  for (int i = 0; i < plan->tickets; i++) {
    const Chain chain = chain_of_ticket(*plan, i);
    out[3 * i] = chain.sequence, out[3 * i + 1] = chain.kv_head, out[3 * i + 2] = chain.kv_tile;
  }
}
}
