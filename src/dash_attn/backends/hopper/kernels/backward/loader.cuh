// One thread: loads the tiles of each step by TMA, two stages ahead of the consumers.
#pragma once
#include "backward/config.cuh"
#include "common/modifiers.cuh"

template <typename V> struct Loader : Role<V> {
  using R = Role<V>;
  using C = typename V::C;
  using R::bars, R::more, R::notes, R::p, R::shared;
  const BackwardMaps& maps;

  DEVICE void run() {
    Pipeline pipe;
    u32 phases = 0;  // instead of the counts in Pipeline: a bit for each stage of Q and dO, and one for K and V
    while (true) {
      notes.await_chain(pipe);
      const int steps = notes.chain(pipe).steps;
      if (steps < 0) return;
      if (steps > 0) {
        bars.kv_empty().wait(phases >> 2 & 1 ^ 1);
        load_kv<C::PANELS>(C::K, maps.k, bars.k_full(), pipe);
#pragma unroll 1
        for (int j = 0; j < steps; j++) {
          load_step(j, phases >> (j & 1) & 1, pipe);
          phases ^= 1 << (j & 1);
        }
        phases ^= 4;
      }
      bars.chain_loaded().arrive();
      bars.chain_empty(pipe.chain_slot()).arrive();
      pipe.finish_chain(steps, sum_pieces<C>(p));
    }
  }

 private:
  template <int PANELS> DEVICE void load_kv(int at, const TensorMap* map, Barrier full, const Pipeline& pipe) {
    ChainNote chain = notes.chain(pipe);
    if constexpr (V::LEGS) chain.kv_head -= more->first_kv_head;
    full.arrive_expect(PANELS * C::KV_PANEL);
    for (int i = 0; i < PANELS; i++)
      tma_load<V::PACKED>(shared + at + i * C::KV_PANEL, map, full.address, 64 * (at == C::K ? C::k_panel(i) : i), chain.kv_head,
                          chain.kv_row, chain.kv_plane);
  }

  DEVICE void load_step(int j, u32 phase, const Pipeline& pipe) {
    const u32 s = j & 1, number = pipe.steps + j;
    bars.note_full(number).wait((number / NOTES) & 1);
    if constexpr (V::DROPOUT || V::ALIBI) load_modifiers(s, phase, load_shared_i32(notes.step_at(number) + OFFSET_OF(StepNote, dq_tile)));
    const StepNote note = notes.step(number);
    load_rows<C::PANELS>({C::Q, C::LSE, maps.q, p.lse, bars.q_full(0), bars.q_empty(0)}, s, phase, note, pipe);
    if (j == 0) load_kv<C::V_PANELS>(C::V, maps.v, bars.v_full(), pipe);  // behind the first Q: S needs no V
    const Rows grad_out{C::DO, C::DELTA, maps.grad_out, p.delta, bars.do_full(0), bars.do_empty(0)};
    if constexpr (C::DO_STAGES == 2)
      load_rows<C::V_PANELS>(grad_out, s, phase, note, pipe);
    else
      load_rows<C::V_PANELS>(grad_out, 0, number & 1, note, pipe);
  }

  // They go with Q.
  DEVICE void load_modifiers(u32 s, u32 phase, int dq_tile) {
    bars.q_empty(s).wait(phase ^ 1);
    bars.q_full(s).expect(MODIFIER_NOTE_BYTES);
    bulk_load(shared + C::SHARED_BYTES + s * MODIFIER_NOTE_BYTES, more->notes + dq_tile, MODIFIER_NOTE_BYTES, bars.q_full(s).address);
  }

  // A tile of Q or dO and the row statistics that go with it. Barriers are those of the first stage.
  struct Rows {
    int at, statistics_at;
    const TensorMap* map;
    const float* statistics;
    Barrier full, empty;
  };
  DEVICE int q_row(const StepNote& note, const Pipeline& pipe) {
    if constexpr (V::MASK != MaskKind::Bits) return note.q_row();
    return notes.q_tile(pipe, note, p.head_tiles) * C::Q_ROWS;
  }
  // By value: by reference the compiler reads parameters at other places. What the load needs is read before the wait: after it,
  // every cycle delays the tile.
  template <int PANELS> DEVICE void load_rows(const Rows rows, u32 s, u32 phase, const StepNote& note, const Pipeline& pipe) {
    const int plane = notes.q_plane(pipe), row = q_row(note, pipe) + (V::PACKED ? notes.q_shift(pipe) : 0);
    rows.empty[s].wait(phase ^ 1);
    rows.full[s].arrive_expect(PANELS * C::Q_PANEL + C::ROW_BYTES);
    for (int i = 0; i < PANELS; i++)
      tma_load<V::PACKED>(shared + rows.at + (s * PANELS + i) * C::Q_PANEL, rows.map, rows.full[s].address, i * 64, note.q_head, row,
                          plane);
    bulk_load(shared + rows.statistics_at + s * C::ROW_BYTES, rows.statistics + (i64)note.dq_tile * C::Q_ROWS, C::ROW_BYTES,
              rows.full[s].address);
  }
};
