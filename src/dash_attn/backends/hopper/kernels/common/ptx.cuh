// One small wrapper per PTX instruction, named after it.
#pragma once
#include "common/shared_with_python.cuh"

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// ---- mbarrier
DEVICE void mbarrier_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void mbarrier_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
DEVICE void mbarrier_arrive_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEVICE void mbarrier_expect(u32 bar, u32 bytes) {  // more bytes in this phase
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEVICE void mbarrier_wait(u32 bar, u32 phase) {
  asm volatile(
      "{\n.reg .pred done;\nWAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra DONE;\nbra WAIT;\nDONE:\n}\n" ::"r"(bar),
      "r"(phase)
      : "memory");
}
DEVICE bool mbarrier_test(u32 bar, u32 phase) {
  u32 done;
  asm volatile("{\n.reg .pred done;\nmbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}\n"
               : "=r"(done)
               : "r"(bar), "r"(phase)
               : "memory");
  return done;
}

// A barrier in shared memory, by its address; [i] is the i-th of an array of them.
struct Barrier {
  u32 address;
  DEVICE Barrier operator[](u32 i) const { return {address + 8 * i}; }
  DEVICE void init(u32 count) const { mbarrier_init(address, count); }
  DEVICE void wait(u32 phase) const { mbarrier_wait(address, phase); }
  DEVICE bool is_over(u32 phase) const { return mbarrier_test(address, phase); }
  DEVICE void arrive() const { mbarrier_arrive(address); }
  DEVICE void arrive_expect(u32 bytes) const { mbarrier_arrive_expect(address, bytes); }
  DEVICE void expect(u32 bytes) const { mbarrier_expect(address, bytes); }
};

// ---- bulk copies (TMA)
// Maps of packed sequences have a fifth axis, whose coordinate is always RAGGED (common/sequence.cuh).
template <bool PACKED> DEVICE void tma_load(u32 shared, const TensorMap* map, u32 bar, int c0, int c1, int c2, int c3) {
  if constexpr (PACKED)
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6,%7}], [%2];" ::"r"(shared),
        "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(RAGGED)
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6}], [%2];" ::"r"(shared),
        "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}
template <bool PACKED> DEVICE void tma_store(const TensorMap* map, u32 shared, int c0, int c1, int c2, int c3) {
  if constexpr (PACKED)
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2,%3,%4,%5,%6}], [%1];" ::"l"(map), "r"(shared), "r"(c0),
                 "r"(c1), "r"(c2), "r"(c3), "r"(RAGGED)
                 : "memory");
  else
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2,%3,%4,%5}], [%1];" ::"l"(map), "r"(shared), "r"(c0),
                 "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}
DEVICE void bulk_load(u32 shared, const void* global, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared), "l"(global),
               "r"(bytes), "r"(bar)
               : "memory");
}
DEVICE void bulk_store(void* global, u32 shared, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes) : "memory");
}
DEVICE void bulk_reduce_add_f32(void* global, u32 shared, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
               : "memory");
}
DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }  // shared memory may be reused
DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }            // the writes have landed

// ---- fences between ordinary accesses and the async proxy (TMA, wgmma)
DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
DEVICE void fence_async_all() { asm volatile("fence.proxy.async;" ::: "memory"); }

// ---- semaphores in global memory
DEVICE int load_acquire(const int* p) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE void store_release(int* p, int v) { asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }

// ---- the last word of a kernel that cannot go on: written to host memory, read by trouble.py
DEVICE void report_and_trap(volatile int* report, Trouble what, int call, int x, int y) {
  report[1] = call;
  report[2] = x;
  report[3] = y;
  __threadfence_system();
  report[0] = (int)what;
  __threadfence_system();
  __trap();
}

// Waits until a semaphore has a value. A validated plan cannot hang; if it does anyway (a corrupted table, a broken driver), the
// kernel stops with the task's name.
template <bool SLEEP, typename Params> DEVICE void await_semaphore(const Params& p, int tile, int value) {
  for (u32 polls = 0; load_acquire(p.semaphores + tile) != value; polls++) {
    if (polls > p.most_polls) report_and_trap(p.report, Trouble::Hang, p.call, tile, value);
    if constexpr (SLEEP) __nanosleep(200);
  }
}

// ---- kernels that overlap: the next one in the stream may start, and what it then waits for
DEVICE void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void await_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- clocks and places, for recordings; volatile, so that nothing is kept in a register
DEVICE u32 cycles() {
  u32 v;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(v)::"memory");
  return v;
}
DEVICE u64 shared_nanoseconds() {
  u64 v;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v)::"memory");
  return v;
}
DEVICE u32 sm_index() {
  u32 v;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(v));
  return v;
}
DEVICE u32 cta_index() {
  u32 v;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(v));
  return v;
}
DEVICE void store_u32x2(void* p, u32 x, u32 y) { asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(x), "r"(y) : "memory"); }

// ---- wgmma control (the products themselves are in the generated common/wgmma.cuh)
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }
// Keeps the compiler from reading an accumulator before the wait above it.
template <int N> DEVICE void pin(float (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(r[i])::"memory");
}

// Shared-memory matrix descriptor: 128-byte swizzle, 1024 bytes between groups of 8 rows. The low word is address / 16 and
// stride / 16 << 16; operands are addressed as an opaque base plus a constant, so that a descriptor costs one add.
DEVICE u64 descriptor(u32 low) { return ((u64)0x40000040u << 32) | low; }
DEVICE u32 opaque(u32 x) {  // stops the compiler from hoisting (and spilling) every descriptor
  u32 y;
  asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
__host__ __device__ constexpr u32 descriptor_low(int byte_offset, int leading_bytes = 16) {
  return (u32)(byte_offset >> 4) | ((u32)(leading_bytes >> 4) << 16);
}

// ---- registers and barriers
template <int N> DEVICE void registers_decrease() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEVICE void registers_increase() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int ID> DEVICE void named_barrier_sync(int threads) { asm volatile("bar.sync %0, %1;" ::"n"(ID), "r"(threads) : "memory"); }
template <int ID> DEVICE void named_barrier_arrive(int threads) { asm volatile("bar.arrive %0, %1;" ::"n"(ID), "r"(threads) : "memory"); }
// The same by a number that is found out on the way, as that of a warpgroup.
DEVICE void named_barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE void named_barrier_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// ---- arithmetic and shared-memory access
DEVICE float exp2_approx(float x) {
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// tanh(x ln(2) / 2). tanh.approx would be one instruction fewer, but good to 11 bits only.
DEVICE float tanh_half_log2(float x) {
  float y;
  asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.f + exp2_approx(x)));
  return fmaf(-2.f, y, 1.f);
}
// POSITIVE: with 0 instead of negative numbers.
template <typename Half, bool POSITIVE = false> DEVICE u32 pack(float low, float high) {
  u32 r;
  if constexpr (Half::is_bf16 && !POSITIVE) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  if constexpr (Half::is_bf16 && POSITIVE) asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  if constexpr (!Half::is_bf16 && !POSITIVE) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  if constexpr (!Half::is_bf16 && POSITIVE) asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
template <typename Half> DEVICE float2 unpack(u32 pair) {
  if constexpr (Half::is_bf16) return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  float2 v;
  asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %2;\ncvt.f32.f16 %0, lo;\ncvt.f32.f16 %1, hi;\n}\n" : "=f"(v.x), "=f"(v.y) : "r"(pair));
  return v;
}
DEVICE float2 load_shared_f32x2(u32 a) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(a));
  return v;
}
DEVICE int load_shared_i32(u32 a) {
  int v;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(v) : "r"(a) : "memory");
  return v;
}
DEVICE void store_shared_i32(u32 a, int v) { asm volatile("st.shared.s32 [%0], %1;" ::"r"(a), "r"(v) : "memory"); }
DEVICE int4 load_shared_i32x4(u32 a) {
  int4 v;
  asm volatile("ld.shared.v4.s32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a) : "memory");
  return v;
}
DEVICE void store_shared_i32x4(u32 a, int4 v) {
  asm volatile("st.shared.v4.s32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE float4 load_shared_f32x4(u32 a) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(a) : "memory");
  return v;
}
DEVICE void store_shared_f32x4(u32 a, float x, float y, float z, float w) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(a), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}
// Four matrices of 8 x 8.
DEVICE void stmatrix(u32 a, const u32* r) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
DEVICE void stmatrix_transposed(u32 a, const u32* r) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
