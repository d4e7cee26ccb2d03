// Enough of CUDA for the kernels of the forward and of decode to run on the host. Threads are fibers that give way where they wait;
// copies between memories happen some time later, in any order. Products are sums in float, whatever their shape.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <vector>
#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__
#define __align__(bytes)
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __host__
struct int2 {
  int x, y;
};
struct uint2 {
  unsigned x, y;
};
struct int4 {
  int x, y, z, w;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
struct Index {
  int x;
};
extern Index blockIdx, threadIdx;
extern unsigned char memory[];
using std::max;
using std::min;
static inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
static inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
static inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
static inline float __fmul_rn(float x, float y) { return x * y; }
#define __log2f std::log2
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int atomicCAS(int* at, int expected, int value) {
  const int before = *at;
  if (before == expected) *at = value;
  return before;
}
static inline unsigned atomicInc(unsigned* at, unsigned last) {
  const unsigned before = *at;
  *at = before >= last ? 0 : before + 1;
  return before;
}
template <typename T> static inline T __ldg(const T* at) { return *at; }
[[noreturn]] void __trap();

// ---- the machine
using Condition = std::function<bool()>;
void wait_until(Condition ready);       // the thread gives way until then
void some_time_later(Condition action);  // done by nobody in particular
unsigned char* at_shared(unsigned address);  // bits 24 and up name the CTA of the cluster, of its own addresses, too
int this_cta();
int threads_of_cta();
struct Exchange {
  unsigned values[2][32];
  int arrived = 0, generation = 0;
};
Exchange& exchange_of_warp();
struct Meeting {
  int arrived = 0, generation = 0;
};
Meeting& named_meeting(int id);

static inline const unsigned* exchange(unsigned value) {
  Exchange& warp = exchange_of_warp();
  const int generation = warp.generation;
  warp.values[generation & 1][threadIdx.x % 32] = value;
  if (++warp.arrived == 32) {
    warp.arrived = 0;
    warp.generation++;
  } else {
    wait_until([&warp, generation] { return warp.generation != generation; });
  }
  return warp.values[generation & 1];
}
static inline void __syncwarp() { exchange(0); }
static inline unsigned __ballot_sync(unsigned, bool mine) {
  const unsigned* all = exchange(mine);
  unsigned bits = 0;
  for (int i = 0; i < 32; i++) bits |= all[i] << i;
  return bits;
}
static inline int __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
static inline int __all_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) == 0xffffffffu; }
static inline float __shfl_xor_sync(unsigned, float x, int mask) {
  return std::bit_cast<float>(exchange(std::bit_cast<unsigned>(x))[(threadIdx.x % 32) ^ mask]);
}
static inline int __shfl_xor_sync(unsigned, int x, int mask) { return (int)exchange((unsigned)x)[(threadIdx.x % 32) ^ mask]; }
static inline int __vimax3_s32(int x, int y, int z) { return std::max(x, std::max(y, z)); }
static inline int __vimin3_s32(int x, int y, int z) { return std::min(x, std::min(y, z)); }
static inline int __shfl_sync(unsigned, int x, int lane) { return (int)exchange((unsigned)x)[lane]; }
static inline void meet(int id, int threads, bool stays) {
  Meeting& meeting = named_meeting(id);
  const int generation = meeting.generation;
  if (++meeting.arrived == threads) {
    meeting.arrived = 0;
    meeting.generation++;
  } else if (stays) {
    wait_until([&meeting, generation] { return meeting.generation != generation; });
  }
}
static inline void __syncthreads() { meet(0, threads_of_cta(), true); }
