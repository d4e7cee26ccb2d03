// Two threads in two warps: add finished dQ tiles to global memory, each in its turn; and dK and dV, where parts of a group sum them.
//
// Drain W takes the steps W, W + 2, ... of a chain, so that the hand-over of one tile overlaps the reduce of the next.
// The hand-over between SMs: poll with ld.acquire, then a proxy fence; reduce; wait until the writes have LANDED (not just
// until shared memory was read), proxy fence, st.release. Anything weaker gives wrong dQ at full size, rarely at small sizes.
#pragma once
#include "backward/config.cuh"

template <int D, int DV, bool ORDERED, bool RECORD, int W> struct Drain {
  using C = BackwardConfig<D, DV>;
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
      int steps = notes.chain(pipe).steps;
      if (steps < 0) break;
      steps += sum_pieces<C>(p);
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
    bars.dq_full(W).wait(C::DQ_PIECES == 2 ? 0 : use & 1);
    const u32 ready = RECORD ? cycles() : 0;
    const StepNote note = notes.step(number);
    bars.note_empty(number).arrive();
    if (ORDERED && note.rank > 0) await_rank(note);
    const u32 turn = RECORD ? cycles() : 0;
    add_piece(note, 0);
    if constexpr (C::DQ_PIECES == 2) {
      bars.dq_full(W).wait(1);
      add_piece(note, 1);
    }
    // Of the two pieces of a sum that a drain adds, the first need not have landed before the second is added.
    const bool another_follows = C::SUM_PIECES == 4 && note.dq_tile >= p.first_sum && (note.dq_tile - p.first_sum) % 4 < 2;
    if (ORDERED && !another_follows) {
      bulk_wait();
      fence_async_global();
      if (C::SUM_PIECES == 4 && note.dq_tile >= p.first_sum) store_release(p.semaphores + note.dq_tile - 2, note.rank + 1);
      store_release(p.semaphores + note.dq_tile, note.rank + 1);
    }
    if (RECORD && note.dq_tile < p.first_sum) record(note, ready, turn);
  }

  // The first rank stores: dQ needs no zeroing.
  DEVICE void add_piece(const StepNote& note, int piece) {
    const bool of_dq = note.dq_tile < p.first_sum;
    float* to = (of_dq ? p.dq + (i64)note.dq_tile * (C::Q_ROWS * C::WIDTH) : p.sums + (i64)(note.dq_tile - p.first_sum) * C::SUM_FLOATS) +
                (piece ? C::piece_bytes(0) / 4 : 0);
    const u32 source = shared + C::dq_staging(W), bytes = of_dq ? C::piece_bytes(piece) : C::sum_piece_bytes(piece);
    if (ORDERED && note.rank == 0)
      bulk_store(to, source, bytes);
    else
      bulk_reduce_add_f32(to, source, bytes);
    bulk_commit();
    bulk_wait_read();
    bars.dq_empty(W).arrive();
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
