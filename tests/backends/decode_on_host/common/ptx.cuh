// The instructions of kernels/common/ptx.cuh, on the host.
#pragma once
#include "common/shared_with_python.cuh"

DEVICE u32 shared_address(const void*) { return 1024 | (u32)this_cta() << 24; }

// ---- mbarrier
struct HostBarrier {
  int count = 0, pending = 0, bytes = 0, phase = 0;
  void look() {
    if (pending != 0 || bytes != 0) return;
    phase ^= 1;
    pending = count;
  }
};
inline std::map<unsigned char*, HostBarrier> barriers;  // by address in all CTAs' memory
DEVICE HostBarrier& barrier_at(u32 address) { return barriers.at(at_shared(address)); }
DEVICE void mbarrier_init(u32 bar, u32 count) { barriers[at_shared(bar)] = {(int)count, (int)count, 0, 0}; }
DEVICE void mbarrier_init_fence() {}
DEVICE void mbarrier_arrive(u32 bar) {
  HostBarrier& b = barrier_at(bar);
  b.pending--;
  b.look();
}
DEVICE void mbarrier_arrive_expect(u32 bar, u32 bytes) {
  barrier_at(bar).bytes += bytes;
  mbarrier_arrive(bar);
}
DEVICE void mbarrier_wait(u32 bar, u32 phase) {
  HostBarrier& b = barrier_at(bar);
  if (b.phase == (int)phase) wait_until([&b, phase] { return b.phase != (int)phase; });
}
struct Barrier {
  u32 address;
  DEVICE Barrier operator[](u32 i) const { return {address + 8 * i}; }
  DEVICE void init(u32 count) const { mbarrier_init(address, count); }
  DEVICE void wait(u32 phase) const { mbarrier_wait(address, phase); }
  DEVICE bool is_over(u32 phase) const { return barrier_at(address).phase != (int)phase; }
  DEVICE void arrive() const { mbarrier_arrive(address); }
  DEVICE void arrive_expect(u32 bytes) const { mbarrier_arrive_expect(address, bytes); }
};

// ---- bulk copies. A tensor map is what Python wrote instead of a CUtensorMap.
struct HostMap {
  char* base;
  int sizes[4], box_rows, box_columns;  // columns, heads, rows, planes
  i64 strides[4];                       // bytes
};
DEVICE u32 swizzled(u32 address, int row_bytes) {
  const int shifts = row_bytes == 128 ? 3 : row_bytes == 64 ? 2 : 1;
  return address ^ (((address >> 7) & ((1 << shifts) - 1)) << 4);
}
template <bool STORE> void copy_box(const HostMap& map, unsigned char* shared, u32 address, int c0, int c1, int c2, int c3) {
  const int width = 2 * map.box_columns;
  for (int row = 0; row < map.box_rows; row++)
    for (int column = 0; column < map.box_columns; column++) {
      const int place[4] = {c0 + column, c1, c2 + row, c3};
      bool inside = true;
      i64 offset = 0;
      for (int axis = 0; axis < 4; axis++) {
        inside = inside && place[axis] >= 0 && place[axis] < map.sizes[axis];
        offset += place[axis] * map.strides[axis];
      }
      short* const mine = reinterpret_cast<short*>(shared + (i64)swizzled(address + row * width + column * 2, width) - address);
      if (STORE && inside) *reinterpret_cast<short*>(map.base + offset) = *mine;
      if (!STORE) *mine = inside ? *reinterpret_cast<short*>(map.base + offset) : 0;
    }
}
template <bool PACKED> DEVICE void tma_load(u32 shared, const TensorMap* map, u32 bar, int c0, int c1, int c2, int c3) {
  static_assert(sizeof(HostMap) <= sizeof(TensorMap));
  const HostMap host = *reinterpret_cast<const HostMap*>(map);
  unsigned char* const to = at_shared(shared);
  HostBarrier& b = barrier_at(bar);
  some_time_later([=, &b] {
    copy_box<false>(host, to, shared, c0, c1, c2, c3);
    b.bytes -= host.box_rows * host.box_columns * 2;
    b.look();
    return true;
  });
}
template <bool PACKED> DEVICE void tma_store(const TensorMap* map, u32 shared, int c0, int c1, int c2, int c3) {
  copy_box<true>(*reinterpret_cast<const HostMap*>(map), at_shared(shared), shared, c0, c1, c2, c3);
}
DEVICE void bulk_commit() {}
DEVICE void bulk_wait_read() {}
DEVICE void bulk_wait() {}
DEVICE void fence_async_shared() {}
DEVICE void fence_async_all() {}

void report(int what, int x, int y);
DEVICE void report_and_trap(volatile int*, Trouble what, int, int x, int y) {
  report((int)what, x, y);
  __trap();
}

// ---- wgmma control
DEVICE void wgmma_fence() {}
DEVICE void wgmma_commit() {}
template <int PENDING> DEVICE void wgmma_wait() {}
template <int N> DEVICE void pin(float (&)[N]) {}
DEVICE u64 descriptor(u32 low) { return ((u64)0x40000040u << 32) | low; }
DEVICE u32 opaque(u32 x) { return x; }
constexpr u32 descriptor_low(int byte_offset, int leading_bytes = 16) { return (u32)(byte_offset >> 4) | ((u32)(leading_bytes >> 4) << 16); }
template <int N> DEVICE void registers_decrease() {}
template <int N> DEVICE void registers_increase() {}
DEVICE void named_barrier_sync(int id, int threads) { meet(id, threads, true); }
DEVICE void named_barrier_arrive(int id, int threads) { meet(id, threads, false); }
template <int ID> DEVICE void named_barrier_sync(int threads) { named_barrier_sync(ID, threads); }
template <int ID> DEVICE void named_barrier_arrive(int threads) { named_barrier_arrive(ID, threads); }

// ---- arithmetic and shared-memory access
DEVICE float exp2_approx(float x) { return std::exp2(x); }
DEVICE float tanh_half_log2(float x) { return fmaf(-2.f, 1.f / (1.f + exp2_approx(x)), 1.f); }
DEVICE unsigned short to_bf16(float x) {
  const u32 bits = std::bit_cast<u32>(x);
  if (x != x) return 0x7fff;
  return (unsigned short)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
template <typename Half> DEVICE u32 pack(float low, float high) {
  static_assert(Half::is_bf16);
  return to_bf16(low) | (u32)to_bf16(high) << 16;
}
DEVICE float from_bf16(unsigned short x) { return std::bit_cast<float>((u32)x << 16); }
template <typename T> DEVICE T load_shared(u32 a) {
  T v;
  memcpy(&v, at_shared(a), sizeof v);
  return v;
}
DEVICE int load_shared_i32(u32 a) { return load_shared<int>(a); }
DEVICE float2 load_shared_f32x2(u32 a) { return load_shared<float2>(a); }
DEVICE int4 load_shared_i32x4(u32 a) { return load_shared<int4>(a); }
DEVICE void store_shared_i32(u32 a, int v) { memcpy(at_shared(a), &v, sizeof v); }
DEVICE void store_shared_i32x4(u32 a, int4 v) { memcpy(at_shared(a), &v, sizeof v); }
// Four matrices of 8 x 8: the rows of matrix i are at the addresses of lanes 8 i to 8 i + 7; a lane has two elements of each.
DEVICE void stmatrix(u32 a, const u32* mine) {
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; i++) {
    const u32* addresses = exchange(a);
    store_shared_i32(addresses[8 * i + lane / 4] + lane % 4 * 4, (int)mine[i]);
  }
}
DEVICE void stmatrix_transposed(u32 a, const u32* mine) {
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; i++) {
    const u32* addresses = exchange(a);
    for (int e = 0; e < 2; e++) {
      const unsigned short half = (unsigned short)(mine[i] >> (16 * e));
      memcpy(at_shared(addresses[8 * i + lane % 4 * 2 + e] + lane / 4 * 2), &half, 2);
    }
  }
}
