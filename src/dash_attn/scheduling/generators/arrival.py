"""Turns frozen from a simulated unordered run: on hardware that behaves like the model, nobody waits.

The run is one head on a fixed nominal machine with constants shipped here, so the order is a function of the problem
alone. It helps only where the walk spreads the chains: walks are cyclic from each chain's own first Q tile.
"""

from dataclasses import replace

import numpy as np

from ..engine import Costs, run_in_model_time
from ..order import ALL_GUARANTEES, HeadOrder, Order, turn_within
from ..problem import Problem
from ..schedule import Schedule

NOMINAL_WORKERS = 64
NOMINAL_COSTS = Costs(compute=10, reduce=3, latency=20, overlap=2)


def arrival(problem: Problem, workers: int) -> Schedule:
    # Each chain from the Q tile on its own diagonal, upward and around.
    diagonal = np.arange(problem.kv_tiles) * problem.q_tiles // problem.kv_tiles
    chain, turned = np.nonzero(np.stack([np.roll(problem.kept[:, kv], -diagonal[kv]) for kv in range(problem.kv_tiles)]))
    q_tile = (turned + diagonal[chain]) % problem.q_tiles
    no_delay = np.zeros(problem.kv_tiles, dtype=np.int64)
    walks = HeadOrder.build(chain, q_tile, turn_within(q_tile, -chain), no_delay)
    start = np.arange(problem.kv_tiles)[::-1]
    one_head = replace(problem, heads=1, group=1, batch=1, head_offset=0, group_parts=1)
    unordered = Schedule.build(one_head, Order("arrival", (walks,)), (start,), NOMINAL_WORKERS)
    run = run_in_model_time(unordered, NOMINAL_COSTS, ordered=False)
    arrived = np.empty(len(chain), dtype=np.int64)
    first_step = np.empty(problem.kv_tiles, dtype=np.int64)
    for ticket, kv_tile in enumerate(start):
        arrived[walks.offsets[kv_tile] : walks.offsets[kv_tile + 1]] = run.reduce_start[run.offsets[ticket] : run.offsets[ticket + 1]]
        first_step[kv_tile] = run.chain_start[ticket] // NOMINAL_COSTS.compute
    turn = turn_within(q_tile, arrived, np.argsort(start)[chain])
    kind = HeadOrder.build(chain, q_tile, turn, first_step)
    return Schedule.build(problem, Order("arrival", (kind,), ALL_GUARANTEES), (start,), workers)
