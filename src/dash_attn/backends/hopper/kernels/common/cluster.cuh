// CTAs of a cluster: memory and barriers of each other.
#pragma once
#include "common/ptx.cuh"

DEVICE u32 place_in_cluster() {
  u32 place;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(place));
  return place;
}
// The address that something of this CTA has in the CTA `place`.
DEVICE u32 in_cta(u32 shared, u32 place) {
  u32 address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(place));
  return address;
}
DEVICE void cluster_sync() { asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Stores to another CTA, and counts the bytes on its barrier.
DEVICE void store_to_cta(u32 remote, float value, u32 remote_barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(remote), "f"(value),
               "r"(remote_barrier)
               : "memory");
}
DEVICE void copy_to_cta(u32 remote, u32 shared, u32 bytes, u32 remote_barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(remote), "r"(shared),
               "r"(bytes), "r"(remote_barrier)
               : "memory");
}
DEVICE void arrive_in_cta(u32 remote_barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(remote_barrier) : "memory");
}
// For barriers on which threads of other CTAs arrive. (Where they copy and count bytes, mbarrier_wait is enough, and keeps the L1 cache.)
DEVICE void wait_for_cluster(u32 barrier, u32 phase) {
  asm volatile(
      "{\n.reg .pred done;\nWAIT:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n@done bra DONE;\nbra WAIT;\nDONE:\n}\n" ::"r"(barrier),
      "r"(phase)
      : "memory");
}
