// Kernels of the forward and of decode as a host library, for tests/backends/test_decode_on_host.py. With BOOLEAN_MASKS: those of
// boolean masks, for test_mask_bits.py.
#include "shim.h"
#include "decode/append.cuh"
#include "decode/attention.cuh"
#include "decode/cluster.cuh"
#include "planning/mask_bits.cuh"
#include "forward/attention.cuh"
#include <random>
#include <string>
#include <ucontext.h>

constexpr int STACK = 131072, MEMORY = 1024 + 232448;
Index blockIdx, threadIdx;
unsigned char memory[1];

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  int cta, thread;
  bool ended = false;
  Condition ready;
};
struct Cta {
  int block, place;
  std::vector<unsigned char> shared;
  std::vector<Exchange> warps;
  std::map<int, Meeting> meetings;
};
static std::vector<Fiber> fibers;
static std::vector<Cta> ctas;
static std::vector<Condition> later;
static std::mt19937 dice;
static ucontext_t scheduler;
static Fiber* now;
static Meeting cluster_meeting;
static std::function<void()> kernel;
static int trouble[3];
static bool trapped;

void wait_until(Condition ready) {
  now->ready = ready;
  swapcontext(&now->context, &scheduler);
}
void some_time_later(Condition action) { later.push_back(action); }
unsigned char* at_shared(unsigned address) {
  Cta& cta = ctas.at(address >> 24);
  const unsigned offset = address & 0xffffff;
  if (offset >= cta.shared.size()) __trap();
  return cta.shared.data() + offset;
}
int this_cta() { return now->cta; }
int threads_of_cta() { return (int)(fibers.size() / ctas.size()); }
Exchange& exchange_of_warp() { return ctas[now->cta].warps[now->thread / 32]; }
Meeting& named_meeting(int id) { return ctas[now->cta].meetings[id]; }
u32 place_in_cluster() { return (u32)ctas[now->cta].place; }
void cluster_sync() {
  const int generation = cluster_meeting.generation;
  if (++cluster_meeting.arrived == (int)fibers.size()) {
    cluster_meeting.arrived = 0;
    cluster_meeting.generation++;
  } else {
    wait_until([generation] { return cluster_meeting.generation != generation; });
  }
}
void report(int what, int x, int y) {
  trouble[0] = what;
  trouble[1] = x;
  trouble[2] = y;
}
void __trap() {
  trapped = true;
  now->ended = true;
  swapcontext(&now->context, &scheduler);
  std::abort();
}
static void run_thread() {
  kernel();
  now->ended = true;
  swapcontext(&now->context, &scheduler);
}

// CTAs that run together: a cluster. Returns false where everybody waits.
static bool run_together(int first_block, int count, int threads) {
  barriers.clear();
  ctas.assign(count, {});
  for (int i = 0; i < count; i++) ctas[i] = {first_block + i, i, std::vector<unsigned char>(MEMORY, 0x7f), std::vector<Exchange>((threads + 31) / 32), {}};
  cluster_meeting = {};
  fibers.assign((size_t)count * threads, {});
  for (size_t i = 0; i < fibers.size(); i++) {
    Fiber& fiber = fibers[i];
    fiber.cta = (int)i / threads;
    fiber.thread = (int)i % threads;
    fiber.stack.resize(STACK);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_thread, 0);
  }
  std::vector<int> warps((fibers.size() + 31) / 32);
  for (size_t i = 0; i < warps.size(); i++) warps[i] = (int)i;
  std::vector<unsigned> laziness(warps.size());  // percent: a few warps are much slower than others
  for (unsigned& lazy : laziness) lazy = dice() % 12 == 0 ? 99 : dice() % 20;
  const unsigned pace = dice() % 2 ? 1 : 8;  // of copies
  for (;;) {
    bool some_left = false, some_ran = false, some_lazy = false;
    std::shuffle(warps.begin(), warps.end(), dice);
    for (int warp : warps) {
      const bool lazy = dice() % 100 < laziness[(size_t)warp];
      for (size_t i = (size_t)warp * 32; i < std::min<size_t>((size_t)warp * 32 + 32, fibers.size()); i++) {
        Fiber& fiber = fibers[i];
        if (fiber.ended) continue;
        some_left = true;
        if (fiber.ready && !fiber.ready()) continue;
        some_lazy |= lazy;
        if (lazy) break;
        some_ran = true;
        fiber.ready = nullptr;
        now = &fiber;
        threadIdx.x = fiber.thread;
        blockIdx.x = ctas[fiber.cta].block;
        swapcontext(&scheduler, &fiber.context);
        if (trapped) return true;
      }
    }
    std::shuffle(later.begin(), later.end(), dice);
    const size_t doing = later.empty() || dice() % pace ? 0 : 1 + dice() % later.size();
    std::vector<Condition> actions(later.end() - (long)doing, later.end());
    later.resize(later.size() - doing);
    for (Condition& action : actions) action();
    if (!some_left) return later.empty();
    if (!some_ran && !some_lazy && later.empty() && doing == 0) return false;
  }
}

#ifdef BOOLEAN_MASKS
template <int D, int CONSUMERS, MaskKind MASK = MaskKind::Bits> static void forward(void** a) {
  attention_forward<bf16, D, CONSUMERS, false, MASK>(*(TensorMap*)a[0], *(TensorMap*)a[1], *(TensorMap*)a[2], *(TensorMap*)a[3],
                                                       *(ForwardParams*)a[4]);
}
template <int Q_ROWS, int KV_ROWS, bool FORWARD> static void pack_bits(void** a) {
  pack_mask_bits<Q_ROWS, KV_ROWS, FORWARD>(*(MaskBitsParams*)a[0]);
}
static const std::map<std::string, void (*)(void**)> KERNELS = {
    {"attention_forward<bf16, 64, 2, false, MaskKind::Bits>", forward<64, 2>},
    {"attention_forward<bf16, 64, 3, false, MaskKind::Bits>", forward<64, 3>},
    {"attention_forward<bf16, 128, 2, false, MaskKind::Bits>", forward<128, 2>},
    {"attention_forward<bf16, 192, 2, false, MaskKind::Bits>", forward<192, 2>},
    {"attention_forward<bf16, 256, 2, false, MaskKind::Bits>", forward<256, 2>},
    {"attention_forward<bf16, 128, 2, false, MaskKind::Band>", forward<128, 2, MaskKind::Band>},
    {"attention_forward<bf16, 64, 2, false, MaskKind::Blocks>", forward<64, 2, MaskKind::Blocks>},
    {"attention_forward<bf16, 128, 2, false, MaskKind::Blocks>", forward<128, 2, MaskKind::Blocks>},
    {"pack_mask_bits<128, 128, true>", pack_bits<128, 128, true>},
    {"pack_mask_bits<192, 128, true>", pack_bits<192, 128, true>},
    {"pack_mask_bits<128, 112, true>", pack_bits<128, 112, true>},
    {"pack_mask_bits<128, 80, true>", pack_bits<128, 80, true>},
    {"pack_mask_bits<128, 128, false>", pack_bits<128, 128, false>},
    {"pack_mask_bits<64, 128, false>", pack_bits<64, 128, false>},
    {"pack_mask_bits<64, 64, false>", pack_bits<64, 64, false>},
};
#else
template <int D, bool SOFTCAP> static void decode(void** a) {
  attention_decode<bf16, D, SOFTCAP>(*(TensorMap*)a[0], *(TensorMap*)a[1], *(DecodeParams*)a[2]);
}
template <int D, int COLUMNS, bool SOFTCAP> static void in_clusters(void** a) {
  attention_decode_cluster<bf16, D, COLUMNS, SOFTCAP>(*(TensorMap*)a[0], *(TensorMap*)a[1], *(DecodeParams*)a[2]);
}
template <int D, int CONSUMERS, bool SOFTCAP, int V_DIM = D> static void forward(void** a) {
  attention_forward<bf16, D, CONSUMERS, SOFTCAP, MaskKind::Band, V_DIM>(*(TensorMap*)a[0], *(TensorMap*)a[1], *(TensorMap*)a[2],
                                                                        *(TensorMap*)a[3], *(ForwardParams*)a[4]);
}
static void append(void** a) { append_to_cache(*(AppendParams*)a[0]); }

static const std::map<std::string, void (*)(void**)> KERNELS = {
    {"attention_decode<bf16, 64, false>", decode<64, false>},
    {"attention_decode<bf16, 64, true>", decode<64, true>},
    {"attention_decode<bf16, 96, false>", decode<96, false>},
    {"attention_decode<bf16, 128, false>", decode<128, false>},
    {"attention_decode<bf16, 192, false>", decode<192, false>},
    {"attention_decode<bf16, 256, false>", decode<256, false>},
    {"attention_decode_cluster<bf16, 64, 16, false>", in_clusters<64, 16, false>},
    {"attention_decode_cluster<bf16, 64, 16, true>", in_clusters<64, 16, true>},
    {"attention_decode_cluster<bf16, 64, 32, false>", in_clusters<64, 32, false>},
    {"attention_decode_cluster<bf16, 64, 32, true>", in_clusters<64, 32, true>},
    {"attention_decode_cluster<bf16, 128, 16, false>", in_clusters<128, 16, false>},
    {"attention_decode_cluster<bf16, 128, 32, false>", in_clusters<128, 32, false>},
    {"attention_decode_cluster<bf16, 128, 64, false>", in_clusters<128, 64, false>},
    {"attention_forward<bf16, 64, 2, false, MaskKind::Band>", forward<64, 2, false>},
    {"attention_forward<bf16, 64, 2, true, MaskKind::Band>", forward<64, 2, true>},
    {"attention_forward<bf16, 64, 3, false, MaskKind::Band>", forward<64, 3, false>},
    {"attention_forward<bf16, 64, 3, true, MaskKind::Band>", forward<64, 3, true>},
    {"attention_forward<bf16, 80, 2, false, MaskKind::Band>", forward<80, 2, false>},
    {"attention_forward<bf16, 96, 2, false, MaskKind::Band>", forward<96, 2, false>},
    {"attention_forward<bf16, 128, 2, false, MaskKind::Band>", forward<128, 2, false>},
    {"attention_forward<bf16, 192, 2, false, MaskKind::Band, 128>", forward<192, 2, false, 128>},
    {"attention_forward<bf16, 192, 2, false, MaskKind::Band>", forward<192, 2, false>},
    {"attention_forward<bf16, 256, 2, false, MaskKind::Band>", forward<256, 2, false>},
    {"append_to_cache", append},
};
#endif

// 0: done. 1: it hangs. 2: it stopped itself; what, x and y are then in `reported`. 3: no such kernel.
extern "C" int run(const char* name, int grid, int cluster, int threads, void** arguments, int seed, int* reported) {
  const auto found = KERNELS.find(name);
  if (found == KERNELS.end()) return 3;
  kernel = [=] { found->second(arguments); };
  dice.seed((unsigned)seed);
  trapped = false;
  later.clear();
  for (int block = 0; block < grid; block += cluster) {
    if (!run_together(block, cluster, threads)) return 1;
    if (!trapped) continue;
    std::copy(trouble, trouble + 3, reported);
    return 2;
  }
  return 0;
}
