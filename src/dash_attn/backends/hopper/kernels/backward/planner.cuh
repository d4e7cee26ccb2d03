// One thread: takes tickets, walks each chain's plan and tells the other roles what comes.
#pragma once
#include "backward/config.cuh"

template <typename V> struct Planner : Role<V> {
  using R = Role<V>;
  using C = typename V::C;
  using R::bars, R::more, R::notes, R::p, R::shared;

  DEVICE void run() {
    Counts counts;
    while (true) {
      const u32 chains = counts.chains();
      if (chains > 0) await_turn(chains - 1);
      const int ticket = atomicAdd(p.next_ticket, 1);
      const u32 slot = chains & 1;
      const Barrier full = bars.chain_full(slot);
      bars.chain_empty(slot).wait(((chains >> 1) & 1) ^ 1);
      if (ticket >= p.next_ticket[1]) {
        store_shared_i32x4(notes.chain_at(slot), make_int4(0, 0, 0, -1));
        full.arrive();
        return;
      }
      if constexpr (V::LEGS)
        if (more->awaited >= 0) await_state(more->awaited + read(p.tickets[ticket].first_sum) - p.first_sum);
      full.arrive_expect(sizeof(ChainRecord));
      bulk_load(notes.chain_at(slot), p.tickets + ticket, sizeof(ChainRecord), full.address);
      full.wait((chains >> 1) & 1);
      // The whole walk for one query head of the part after the other: chains that follow each other share Q tiles in the cache.
#pragma unroll 1
      for (int m = 0; m < word(notes.chain_at(slot), &ChainRecord::members); m++) counts = walk(notes.chain_at(slot), m, counts);
      if (p.sums != nullptr) counts = end(notes.chain_at(slot), counts);
      counts.add_chain();
    }
  }

 private:
  // Chains and steps so far in one register: of the steps only the place in the ring of notes and its phase matter.
  struct Counts {
    u32 bits = 0;
    DEVICE u32 chains() const { return bits / (2 * NOTES); }
    DEVICE u32 steps() const { return bits % (2 * NOTES); }
    DEVICE void add_chain() { bits += 2 * NOTES; }
    DEVICE void add_step() { bits = chains() * (2 * NOTES) + (bits + 1) % (2 * NOTES); }
  };
  // A member of a chain's record, in its note.
  static DEVICE int word(u32 chain, int ChainRecord::* member) {
    return load_shared_i32(chain + (u32)(u64) & (((ChainRecord*)nullptr)->*member));
  }

  // The next ticket is taken when the loader is through with the chain before, so that its tiles can follow at once. But a
  // chain of the gang this CTA still works for may only be taken by a CTA that is free to run it, else the gang could wait
  // for a chain that nobody runs. Tickets only grow: once they are past the gang, the next one is of another gang.
  DEVICE void await_turn(u32 chain) {
    bars.chain_loaded().wait(chain & 1);
    if (load_acquire(p.next_ticket) < word(notes.chain_at(chain & 1), &ChainRecord::gang_end))
      bars.chain_empty(chain & 1).wait((chain >> 1) & 1);
  }

  // Consumers take the state when they know of the chain, so all pieces of it must be there before.
  DEVICE void await_state(int first_piece) {
#pragma unroll 1
    for (int piece = first_piece; piece < first_piece + C::SUM_PIECES; piece++) await_semaphore<true>(p, piece, 1);
  }

  // What belongs to the chain is read anew for every step: registers are scarcer than shared-memory loads.
  DEVICE Counts walk(u32 chain, int m, Counts counts) {
    Walk table_walk(word(chain, &ChainRecord::first_run));
#pragma unroll 1
    for (int i = 0; i < word(chain, &ChainRecord::walk) >> 1; i++, counts.add_step()) {
      Step step;
      if constexpr (V::PACKED)
        step = PackedWalk<C::Q_ROWS, C::KV_ROWS>::step(p.chains[word(chain, &ChainRecord::first_run)], i);
      else
        step = table_walk.next(p.runs, p.entries);
      const u32 number = counts.steps();
      bars.note_empty(number).wait(((number / NOTES) & 1) ^ 1);
      const int member = word(chain, &ChainRecord::walk) & 1 ? word(chain, &ChainRecord::members) - 1 - m : m;
      store_shared_i32x4(notes.step_at(number),
                         make_int4(rows_of(chain, step, member), word(chain, &ChainRecord::q_head) + member,
                                   word(chain, &ChainRecord::first_dq_tile) + member * p.head_tiles + step.q_tile, step.turn));
      bars.note_full(number).arrive();
    }
    return counts;
  }

  DEVICE int rows_of(u32 chain, const Step& step, int member) {
    if constexpr (V::MASK != MaskKind::Bits) return StepNote::pack_rows(step.q_tile * C::Q_ROWS, step.partial);
    if (!step.partial) return 0;
    return BitTables::note(BitTables{p.mask}.number(word(chain, &ChainRecord::kv_row) / C::KV_ROWS, step.q_tile,
                                                    word(chain, &ChainRecord::q_plane), word(chain, &ChainRecord::q_head) + member));
  }

  // dK and dV go to the sums of their KV tile as contributions to dQ go to dQ: in pieces, each in its turn.
  DEVICE Counts end(u32 chain, Counts counts) {
#pragma unroll 1
    for (int piece = 0; piece < C::SUM_PIECES; piece++, counts.add_step()) {
      const u32 number = counts.steps();
      bars.note_empty(number).wait(((number / NOTES) & 1) ^ 1);
      store_shared_i32x4(notes.step_at(number),
                         make_int4(0, 0, word(chain, &ChainRecord::first_sum) + piece, word(chain, &ChainRecord::turn)));
      bars.note_full(number).arrive();
    }
    return counts;
  }
};
