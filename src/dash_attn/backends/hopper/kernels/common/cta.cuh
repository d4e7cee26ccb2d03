// What the roles of all attention kernels begin with, and how their warps meet.
#pragma once
#include "common/ptx.cuh"

// The shared memory that a launch asked for.
DEVICE u32 shared_memory() {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  if (shared & 1023) __trap();  // the swizzle pattern needs 1024-byte alignment
  return shared;
}
DEVICE int warp_index() { return __shfl_sync(0xffffffffu, threadIdx.x / WARP, 0); }

// One arrival per warp.
DEVICE void arrive_as_warp(Barrier barrier, int lane) {
  __syncwarp();
  if (lane == 0) barrier.arrive();
}
