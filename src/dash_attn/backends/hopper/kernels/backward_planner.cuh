// One thread: takes tickets, walks each chain's plan and tells the other roles what comes.
#pragma once
#include "backward_config.cuh"

template <int D, int Q_ROWS> struct Planner {
  using C = BackwardConfig<D, Q_ROWS>;
  const BackwardParams& p;
  Notes<C> notes;
  u32 bar;

  DEVICE void run() {
    u32 chains = 0, steps_before = 0;
    while (true) {
      const u32 slot = chains & 1;
      if (chains > 0) await_turn(chains - 1);
      const int ticket = atomicAdd(p.next_ticket, 1);
      mbarrier_wait(bar + CHAIN_EMPTY + 8 * slot, ((chains >> 1) & 1) ^ 1);
      if (ticket >= p.plan.tickets) {
        announce(slot, make_int4(0, 0, 0, -1));
        return;
      }
      const Chain chain = chain_of_ticket(p.plan, ticket);
      const int steps = p.plan.chain_steps[chain.table] * p.group;
      announce(slot, make_int4(chain.sequence, chain.kv_head, chain.kv_tile, steps));
      if (steps > 0) walk(chain, steps, steps_before);
      steps_before += steps;
      chains++;
    }
  }

 private:
  // The next ticket is taken when the loader is through with the chain before, so that its tiles can follow at once. A chain
  // of a gang may only be taken by a CTA that is free to run it, else the gang could wait for a chain nobody runs.
  DEVICE void await_turn(u32 chain) {
    if (p.plan.prefetch_tickets)
      mbarrier_wait(bar + CHAIN_LOADED, chain & 1);
    else
      mbarrier_wait(bar + CHAIN_EMPTY + 8 * (chain & 1), (chain >> 1) & 1);
  }

  DEVICE void announce(u32 slot, int4 note) {
    store_shared_i32x4(notes.chain_at(slot), note);
    mbarrier_arrive(bar + CHAIN_FULL + 8 * slot);
  }

  DEVICE void walk(const Chain& chain, int steps, u32 number) {
    Walk plan_walk(p.plan, chain.table);
    const int first_head = chain.kv_head * p.group, first_tile = (chain.sequence * p.kv_heads * p.group + first_head) * p.q_tiles;
#pragma unroll 1
    for (const u32 end = number + steps; number != end;) {
      const Step step = plan_walk.next(p.plan);
#pragma unroll 1
      for (int member = 0; member < p.group; member++, number++) {  // query heads of the group, innermost
        const u32 ring = 8 * (number % NOTES);
        mbarrier_wait(bar + NOTE_EMPTY + ring, ((number / NOTES) & 1) ^ 1);
        store_shared_i32x4(notes.step_at(number), make_int4(first_tile + member * p.q_tiles + step.q_tile, step.q_tile * Q_ROWS, step.rank,
                                                            2 * (first_head + member) + step.partial));
        mbarrier_arrive(bar + NOTE_FULL + ring);
      }
    }
  }
};
