// One thread: loads the tiles of each step by TMA, two stages ahead of the consumers.
#pragma once
#include "backward/config.cuh"

template <int D, MaskKind MASK> struct Loader {
  using C = BackwardConfig<D>;
  const BackwardParams& p;
  const TensorMap *q_map, *k_map, *v_map, *do_map;
  Notes<C> notes;
  u32 shared;

  DEVICE void run() {
    Pipeline pipe;
    u32 phases = 0;  // instead of the counts in Pipeline: a bit for each stage of Q and dO, and one for K and V
    while (true) {
      notes.await_chain(pipe);
      const int steps = notes.chain(pipe).steps;
      if (steps < 0) return;
      if (steps > 0) {
        mbarrier_wait(shared + C::BARRIERS + KV_EMPTY, phases >> 2 & 1 ^ 1);
        load_kv(C::K, k_map, K_FULL, pipe);
#pragma unroll 1
        for (int j = 0; j < steps; j++) {
          load_step(j, phases >> (j & 1) & 1, pipe);
          phases ^= 1 << (j & 1);
        }
        phases ^= 4;
      }
      mbarrier_arrive(shared + C::BARRIERS + CHAIN_LOADED);
      mbarrier_arrive(shared + C::BARRIERS + CHAIN_EMPTY + 8 * pipe.chain_slot());
      pipe.finish_chain(steps);
    }
  }

 private:
  DEVICE void load_kv(int at, const TensorMap* map, int full, const Pipeline& pipe) {
    const ChainNote chain = notes.chain(pipe);
    mbarrier_arrive_expect(shared + C::BARRIERS + full, C::KV_BYTES);
    for (int i = 0; i < C::PANELS; i++)
      tma_load<MASK == MaskKind::Packed>(shared + at + i * C::KV_PANEL, map, shared + C::BARRIERS + full, i * 64, chain.kv_head, chain.kv_row, chain.kv_plane);
  }

  DEVICE void load_step(int j, u32 phase, const Pipeline& pipe) {
    const u32 s = j & 1, number = pipe.steps + j;
    mbarrier_wait(shared + C::BARRIERS + NOTE_FULL + 8 * (number % NOTES), (number / NOTES) & 1);
    const StepNote note = notes.step(number);
    load_rows(C::Q, C::LSE, q_map, p.lse, Q_FULL, s, phase, note, pipe);
    if (j == 0) load_kv(C::V, v_map, V_FULL, pipe);  // behind the first Q: S needs no V
    if constexpr (C::DO_STAGES == 2)
      load_rows(C::DO, C::DELTA, do_map, p.delta, DO_FULL, s, phase, note, pipe);
    else
      load_rows(C::DO, C::DELTA, do_map, p.delta, DO_FULL, 0, number & 1, note, pipe);
  }

  // A tile of Q or dO and the row statistics that go with it. What the load needs is read before the wait: behind it, every
  // cycle is one that the tile comes later.
  DEVICE void load_rows(int at, int statistics_at, const TensorMap* map, const float* statistics, int full, u32 s, u32 phase,
                        const StepNote& note, const Pipeline& pipe) {
    constexpr int EMPTY_BEHIND_FULL = Q_EMPTY - Q_FULL;
    static_assert(EMPTY_BEHIND_FULL == DO_EMPTY - DO_FULL, "barriers of Q and dO are laid out alike");
    const int plane = notes.q_plane(pipe), row = note.q_row() + (MASK == MaskKind::Packed ? notes.q_shift(pipe) : 0);
    mbarrier_wait(shared + C::BARRIERS + full + EMPTY_BEHIND_FULL + 8 * s, phase ^ 1);
    mbarrier_arrive_expect(shared + C::BARRIERS + full + 8 * s, C::Q_BYTES + C::ROW_BYTES);
    for (int i = 0; i < C::PANELS; i++)
      tma_load<MASK == MaskKind::Packed>(shared + at + s * C::Q_BYTES + i * C::Q_PANEL, map, shared + C::BARRIERS + full + 8 * s, i * 64, note.q_head, row, plane);
    bulk_load(shared + statistics_at + s * C::ROW_BYTES, statistics + (i64)note.dq_tile * C::Q_ROWS, C::ROW_BYTES, shared + C::BARRIERS + full + 8 * s);
  }
};
