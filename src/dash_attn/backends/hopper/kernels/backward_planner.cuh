// One thread: takes tickets, walks each chain's plan and tells the other roles what comes.
#pragma once
#include "backward_config.cuh"

template <int D, MaskKind MASK> struct Planner {
  using C = BackwardConfig<D>;
  const BackwardParams& p;
  Notes<C> notes;
  u32 bar;

  DEVICE void run() {
    u32 chains = 0, number = 0;  // chains and steps so far
    int ticket = 0;
    while (true) {
      if (chains > 0) await_turn(chains - 1, p.tickets[ticket].gang_end);
      ticket = atomicAdd(p.next_ticket, 1);
      mbarrier_wait(bar + CHAIN_EMPTY + 8 * (chains & 1), ((chains >> 1) & 1) ^ 1);
      const u32 note = notes.chain_at(chains & 1);
      if (ticket >= p.next_ticket[1]) {
        store_shared_i32x4(note, make_int4(0, 0, 0, -1));
        mbarrier_arrive(bar + CHAIN_FULL + 8 * (chains & 1));
        return;
      }
      const int4* words = (const int4*)&p.tickets[ticket];
      int4 chain = words[0];
      chain.w *= p.group;  // a step is a Q tile of one query head
      store_shared_i32x4(note, chain);
      store_shared_i32x4(note + 16, words[1]);
      mbarrier_arrive(bar + CHAIN_FULL + 8 * (chains & 1));
      // The whole walk for one query head of the group after the other: chains that follow each other share Q tiles in the cache.
#pragma unroll 1
      for (int m = 0; m < p.group; m++) number = walk(ticket, p.tickets[ticket].last_member_first ? p.group - 1 - m : m, number);
      chains++;
    }
  }

 private:
  // The next ticket is taken when the loader is through with the chain before, so that its tiles can follow at once. But a
  // chain of the gang this CTA still works for may only be taken by a CTA that is free to run it, else the gang could wait
  // for a chain that nobody runs. Tickets only grow: once they are past the gang, the next one is of another gang.
  DEVICE void await_turn(u32 chain, int gang_end) {
    mbarrier_wait(bar + CHAIN_LOADED, chain & 1);
    if (load_acquire(p.next_ticket) < gang_end) mbarrier_wait(bar + CHAIN_EMPTY + 8 * (chain & 1), (chain >> 1) & 1);
  }

  // What belongs to the ticket is read anew for every step: registers are scarcer than cached loads.
  DEVICE u32 walk(int ticket, int member, u32 number) {
    Walk table_walk(p.tickets[ticket].first_run);
#pragma unroll 1
    for (int left = p.tickets[ticket].steps; left > 0; left--, number++) {
      Step step;
      if constexpr (MASK == MaskKind::Packed)
        step = PackedWalk<C::Q_ROWS, C::KV_ROWS>::step(p.chains[p.tickets[ticket].first_run], p.tickets[ticket].steps - left);
      else
        step = table_walk.next(p.runs, p.entries);
      const u32 ring = 8 * (number % NOTES);
      mbarrier_wait(bar + NOTE_EMPTY + ring, ((number / NOTES) & 1) ^ 1);
      store_shared_i32x4(notes.step_at(number), make_int4(StepNote::pack_rows(step.q_tile * C::Q_ROWS, step.partial),
                                                          p.tickets[ticket].kv_head * p.group + member,
                                                          p.tickets[ticket].first_dq_tile + member * p.head_tiles + step.q_tile, step.rank));
      mbarrier_arrive(bar + NOTE_FULL + ring);
    }
    return number;
  }
};
