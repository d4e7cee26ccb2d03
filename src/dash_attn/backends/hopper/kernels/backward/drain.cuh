// Two threads in two warps: add finished dQ tiles to global memory, each in its turn.
//
// Drain W takes the steps W, W + 2, ... of a chain, so that the hand-over of one tile overlaps the reduce of the next.
// The hand-over between SMs: poll with ld.acquire, then a proxy fence; reduce; wait until the writes have LANDED (not just
// until shared memory was read), proxy fence, st.release. Anything weaker gives wrong dQ at full size, rarely at small sizes.
#pragma once
#include "backward/config.cuh"

template <int D, bool ORDERED, bool RECORD, int W> struct Drain {
  using C = BackwardConfig<D>;
  const BackwardParams& p;
  Notes<C> notes;
  Barriers<C> bars;
  u32 shared;

  DEVICE void run() {
    Pipeline pipe;
    u32 uses = 0;  // of this drain's staging buffer
    if (RECORD && W == 0) note_clocks(0);
    while (true) {
      notes.await_chain(pipe);
      const int steps = notes.chain(pipe).steps;
      if (steps < 0) break;
#pragma unroll 1
      for (u32 number = pipe.steps + W; (int)(number - pipe.steps) < steps; number += DRAINS) drain_step(number, uses++);
      bars.chain_empty(pipe.chain_slot()).arrive();
      pipe.finish_chain(steps);
    }
    bulk_wait();
    if (RECORD && W == 0) note_clocks(gridDim.x);
  }

 private:
  DEVICE void drain_step(u32 number, u32 use) {
    await_part(0, use);
    const u32 ready = RECORD ? cycles() : 0;
    const StepNote note = notes.step(number);
    bars.note_empty(number).arrive();
    if (ORDERED && note.rank > 0) await_rank(note);
    const u32 turn = RECORD ? cycles() : 0;
    add_part(note, 0);
#pragma unroll 1
    for (int part = 1; part < C::DQ_PARTS; part++) {
      await_part(part, use);
      add_part(note, part);
    }
    if (ORDERED) {
      bulk_wait();
      fence_async_global();
      store_release(p.semaphores + note.dq_tile, note.rank + 1);
    }
    if (RECORD) record(note, ready, turn);
  }

  DEVICE void await_part(int part, u32 use) { bars.dq_full(W, C::part_warpgroup(part)).wait(C::part_phase(part, use)); }

  // The first rank stores: dQ needs no zeroing.
  DEVICE void add_part(const StepNote& note, int part) {
    float* to = p.dq + (i64)note.dq_tile * (C::Q_ROWS * C::WIDTH) + C::part_offset(part) / 4;
    const u32 source = shared + C::part_staging(W, part);
    if (ORDERED && note.rank == 0)
      bulk_store(to, source, C::part_bytes(part));
    else
      bulk_reduce_add_f32(to, source, C::part_bytes(part));
    bulk_commit();
    bulk_wait_read();
    bars.dq_empty(C::part_empty(W, part)).arrive();
  }

  DEVICE void await_rank(const StepNote& note) {
    await_semaphore<false>(p, note.dq_tile, note.rank);
    fence_async_global();
  }

  // One store, late: registers are scarcer than anything.
  DEVICE void record(const StepNote& note, u32 ready, u32 turn) const {
    store_u32x4(p.record + ((u32)note.dq_tile * p.record_ranks + note.rank), ready, turn, cycles(), cta_index());
  }

  // The two clocks at one moment: a tick of the shared one, which may stand still for a microsecond.
  DEVICE void note_clocks(u32 offset) {
    const u64 before = shared_nanoseconds();
    u64 now = before;
    while (now == before) now = shared_nanoseconds();
    p.clocks[offset + blockIdx.x] = {now, cycles(), sm_index()};
  }
};
