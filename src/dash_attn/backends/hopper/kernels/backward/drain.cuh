// Two threads in two warps: add finished dQ tiles to global memory, each in its turn; and dK and dV, where parts of a group sum them.
//
// Drain W takes the steps W, W + 2, ... of a chain, so that the hand-over of one tile overlaps the reduce of the next.
// The hand-over between SMs: poll with ld.acquire, then a proxy fence; reduce; wait until the writes have LANDED (not just
// until shared memory was read), proxy fence, st.release. Anything weaker gives wrong dQ at full size, rarely at small sizes.
#pragma once
#include "backward/config.cuh"

template <typename V, int W> struct Drain : Role<V> {
  using R = Role<V>;
  using C = typename V::C;
  using R::bars, R::notes, R::p, R::shared;
  static constexpr bool ORDERED = V::ORDERED, RECORD = V::RECORD, LEGS = V::LEGS;

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
      for (u32 number = pipe.steps + W, end = pipe.steps + steps; (int)(number - end) < 0; number += DRAINS) drain_step(number, uses++);
      bars.chain_empty(pipe.chain_slot()).arrive();
      pipe.finish_chain(steps);
    }
    bulk_wait();
    if (RECORD && W == 0) note_clocks(gridDim.x);
  }

 private:
  DEVICE void drain_step(u32 number, u32 use) {
    bars.note_full(number).wait((number / NOTES) & 1);  // a piece of a sum may be ready before the planner has written its note
    await_piece(0, use);
    const u32 ready = RECORD ? cycles() : 0;
    const StepNote note = notes.step(number);
    bars.note_empty(number).arrive();
    if (ORDERED && note.turn > 0) await_turn(note);
    if (RECORD && of_dq(note)) store_u32x2(record(note), ready, cycles());
#pragma unroll 1
    for (int piece = 0; piece < C::DQ_PIECES; piece++) {
      await_piece(piece, use);  // the first is there
      add_piece(note, piece);
    }
    if (ORDERED) {
      bulk_wait();
      fence_async_global();
      store_release(p.semaphores + note.dq_tile, note.turn + 1);
    }
    if (RECORD && of_dq(note)) store_u32x2((u32*)record(note) + 2, cycles(), cta_index());
  }

  // Else of a sum of dK and dV.
  DEVICE bool of_dq(const StepNote& note) const { return note.dq_tile < p.first_sum; }

  // Sums lie behind dQ; states, where they came to.
  DEVICE float* tile_of(const StepNote& note) const {
    constexpr int DQ_FLOATS = C::Q_ROWS * C::WIDTH;
    if ((!LEGS && C::SUM_FLOATS == DQ_FLOATS) || of_dq(note)) return p.dq + (i64)note.dq_tile * DQ_FLOATS;
    return p.sums + (i64)(note.dq_tile - p.first_sum) * C::SUM_FLOATS;
  }

  DEVICE void await_piece(int piece, u32 use) { bars.dq_full(W, C::piece_warpgroup(piece)).wait(C::piece_phase(piece, use)); }

  // The first turn stores: dQ needs no zeroing.
  DEVICE void add_piece(const StepNote& note, int piece) {
    float* to = tile_of(note) + C::piece_offset(piece) / 4;
    const u32 source = shared + C::dq_staging(W, piece),
              bytes = C::DQ_PIECES > 1 || of_dq(note) ? C::piece_bytes(piece) : 4 * C::SUM_FLOATS;
    if (ORDERED && note.turn == 0)
      bulk_store(to, source, bytes);
    else if constexpr (C::DQ_PIECES > 1)  // unrolled: a register less
#pragma unroll
      for (int at = 0; at < C::piece_bytes(piece); at += C::REDUCE_BYTES) bulk_reduce_add_f32((char*)to + at, source + at, C::REDUCE_BYTES);
    else
#pragma unroll 1
      for (u32 at = 0; at < bytes; at += C::REDUCE_BYTES) bulk_reduce_add_f32((char*)to + at, source + at, C::REDUCE_BYTES);
    bulk_commit();
    bulk_wait_read();
    bars.dq_empty(C::piece_empty(W, piece)).arrive();
  }

  DEVICE void await_turn(const StepNote& note) {
    await_semaphore<false>(p, note.dq_tile, note.turn);
    fence_async_global();
  }

  // Written in two halves: registers are scarcer than anything.
  DEVICE void* record(const StepNote& note) const { return p.record + ((u32)note.dq_tile * p.record_turns + note.turn); }

  // The two clocks at one moment: a tick of the shared one, which may stand still for a microsecond.
  DEVICE void note_clocks(u32 offset) {
    const u64 before = shared_nanoseconds();
    u64 now = before;
    while (now == before) now = shared_nanoseconds();
    p.clocks[offset + blockIdx.x] = {now, cycles(), sm_index()};
  }
};
