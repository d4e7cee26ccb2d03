// One thread: takes tickets, walks each chain's plan and tells the other roles what comes.
#pragma once
#include "backward/config.cuh"

template <int D, MaskKind MASK> struct Planner {
  using C = BackwardConfig<D>;
  const BackwardParams& p;
  Notes<C> notes;
  u32 shared;

  DEVICE void run() {
    Counts counts;
    while (true) {
      const u32 chains = counts.chains();
      if (chains > 0) await_turn(chains - 1);
      const int ticket = atomicAdd(p.next_ticket, 1);
      const u32 slot = chains & 1, full = shared + C::BARRIERS + CHAIN_FULL + 8 * slot;
      mbarrier_wait(shared + C::BARRIERS + CHAIN_EMPTY + 8 * slot, ((chains >> 1) & 1) ^ 1);
      if (ticket >= p.next_ticket[1]) {
        store_shared_i32x4(notes.chain_at(slot), make_int4(0, 0, 0, -1));
        mbarrier_arrive(full);
        return;
      }
      mbarrier_arrive_expect(full, sizeof(ChainRecord));
      bulk_load(notes.chain_at(slot), p.tickets + ticket, sizeof(ChainRecord), full);
      mbarrier_wait(full, (chains >> 1) & 1);
      // The whole walk for one query head of the group after the other: chains that follow each other share Q tiles in the cache.
#pragma unroll 1
      for (int m = 0; m < p.group; m++) counts = walk(notes.chain_at(slot), m, counts);
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
  enum : u32 { KV_HEAD = 0, FIRST_RUN = 32, FIRST_DQ_TILE = 36, GANG_END = 40, WALK = 44 };  // of ChainRecord

  // The next ticket is taken when the loader is through with the chain before, so that its tiles can follow at once. But a
  // chain of the gang this CTA still works for may only be taken by a CTA that is free to run it, else the gang could wait
  // for a chain that nobody runs. Tickets only grow: once they are past the gang, the next one is of another gang.
  DEVICE void await_turn(u32 chain) {
    mbarrier_wait(shared + C::BARRIERS + CHAIN_LOADED, chain & 1);
    if (load_acquire(p.next_ticket) < load_shared_i32(notes.chain_at(chain & 1) + GANG_END))
      mbarrier_wait(shared + C::BARRIERS + CHAIN_EMPTY + 8 * (chain & 1), (chain >> 1) & 1);
  }

  // What belongs to the chain is read anew for every step: registers are scarcer than shared-memory loads.
  DEVICE Counts walk(u32 chain, int m, Counts counts) {
    Walk table_walk(load_shared_i32(chain + FIRST_RUN));
#pragma unroll 1
    for (int i = 0; i < load_shared_i32(chain + WALK) >> 1; i++, counts.add_step()) {
      Step step;
      if constexpr (MASK == MaskKind::Packed)
        step = PackedWalk<C::Q_ROWS, C::KV_ROWS>::step(p.chains[load_shared_i32(chain + FIRST_RUN)], i);
      else
        step = table_walk.next(p.runs, p.entries);
      const u32 number = counts.steps(), ring = 8 * (number % NOTES);
      mbarrier_wait(shared + C::BARRIERS + NOTE_EMPTY + ring, ((number / NOTES) & 1) ^ 1);
      const int member = load_shared_i32(chain + WALK) & 1 ? p.group - 1 - m : m;
      store_shared_i32x4(notes.step_at(number), make_int4(StepNote::pack_rows(step.q_tile * C::Q_ROWS, step.partial),
                                                          load_shared_i32(chain + KV_HEAD) * p.group + member,
                                                          load_shared_i32(chain + FIRST_DQ_TILE) + member * p.head_tiles + step.q_tile, step.rank));
      mbarrier_arrive(shared + C::BARRIERS + NOTE_FULL + ring);
    }
    return counts;
  }
};
