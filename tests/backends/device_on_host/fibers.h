// Runs a block of a kernel: a fiber per thread, one after the other, as far as the next __syncthreads.
#pragma once
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
