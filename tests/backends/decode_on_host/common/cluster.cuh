// The instructions of kernels/common/cluster.cuh, on the host.
#pragma once
#include "common/ptx.cuh"

u32 place_in_cluster();
void cluster_sync();
DEVICE u32 in_cta(u32 shared, u32 place) { return (shared & 0xffffff) | place << 24; }
DEVICE void copy_to_cta(u32 remote, u32 shared, u32 bytes, u32 remote_barrier) {
  unsigned char *const to = at_shared(remote), *const from = at_shared(shared);
  HostBarrier& b = barrier_at(remote_barrier);
  some_time_later([=, &b] {
    memcpy(to, from, bytes);
    b.bytes -= bytes;
    b.look();
    return true;
  });
}
DEVICE void store_to_cta(u32 remote, float value, u32 remote_barrier) {
  unsigned char* const to = at_shared(remote);
  HostBarrier& b = barrier_at(remote_barrier);
  some_time_later([=, &b] {
    memcpy(to, &value, 4);
    b.bytes -= 4;
    b.look();
    return true;
  });
}
DEVICE void arrive_in_cta(u32 remote_barrier) { mbarrier_arrive(remote_barrier); }
DEVICE void wait_for_cluster(u32 barrier, u32 phase) { mbarrier_wait(barrier, phase); }
