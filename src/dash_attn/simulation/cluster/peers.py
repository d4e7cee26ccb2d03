"""Ring attention and Ulysses on the same cluster: models of what they must send and compute, never measurements.

Both compute a task as fast as one rank does on average, and neither pays for launches. So they are shown at their best. Neither has
bits that are independent of the number of ranks in the way that dash-attn has: ring attention adds dQ in another order for each.
"""

from dataclasses import dataclass

import numpy as np

from ...scheduling.problem import Problem
from ...scheduling.ranks.sharding import Sharding
from ..machines import STATE_BYTES, Cluster


@dataclass(frozen=True)
class PeerEstimate:
    """`forward_bytes` and `backward_bytes` are what a rank sends; `makespan` is of the backward, in microseconds."""

    name: str
    forward_bytes: int
    backward_bytes: int
    makespan: float
    efficiency: float


def ring_attention(problem: Problem, sharding: Sharding, cluster: Cluster, one_rank: float) -> PeerEstimate:
    """P steps. In step s rank p works on the keys of rank p - s; K and V go on to the next rank meanwhile, and so do the float32
    dK and dV, which need one more turn to come home. A step takes the longest compute of any rank or the transfer, whichever is
    longer. Rows are dealt as for dash-attn.
    """
    ranks = sharding.ranks
    rows = max(len(sharding.rows_of(rank)) for rank in range(ranks))
    heads = problem.heads * problem.batch
    keys = heads * cluster.widths.keys(rows)
    sums = heads * rows * (cluster.widths.dim_qk + cluster.widths.dim_v) * STATE_BYTES
    per_task = one_rank / max(1, problem.tasks)
    steps = _ring_tasks(problem, sharding)
    makespan = 0.0
    for step, tasks in enumerate(steps):
        # dK and dV of a step leave behind its compute, so that they travel beside the next one.
        size = (keys if step < ranks - 1 else 0) + (sums if step else 0)
        transfer = cluster.transfer_us(size) + cluster.hop_latency_us if ranks > 1 and size else 0.0
        makespan += max(tasks * per_task, transfer)
    if ranks > 1:
        makespan += cluster.transfer_us(sums) + cluster.hop_latency_us  # the last turn, home
    sent = (ranks - 1) * keys, (ranks - 1) * keys + (ranks * sums if ranks > 1 else 0)
    return PeerEstimate("ring attention", *sent, makespan, efficiency(one_rank, ranks, makespan))


def _ring_tasks(problem: Problem, sharding: Sharding) -> list[int]:
    """Tasks of the busiest rank in each step."""
    ranks = sharding.ranks
    of_q, of_kv = (np.array(sharding.owners)[sharding.chunk_of_tiles(tile)] for tile in (problem.tile_q, problem.tile_kv))
    q_tile, kv_tile = np.nonzero(problem.kept)
    met = np.zeros((ranks, ranks), dtype=np.int64)  # rank of the queries, rank of the keys
    np.add.at(met, (of_q[q_tile], of_kv[kv_tile]), problem.group * problem.heads * problem.batch)
    there = np.arange(ranks)
    return [int(met[there, (there - step) % ranks].max()) for step in range(ranks)]


def ulysses(problem: Problem, sharding: Sharding, cluster: Cluster, one_rank: float) -> PeerEstimate | str:
    """All-to-all of q, k, v and out over the heads, whole heads on each rank, all-to-all back: of dout before the backward and of dq,
    dk and dv behind it. Nothing is hidden behind compute. Needs KV heads that P divides; else the reason is returned.
    """
    ranks, widths = sharding.ranks, cluster.widths
    if problem.heads % ranks:
        return f"needs a number of KV heads that {ranks} ranks divide; got {problem.heads}"
    query_heads = problem.heads * problem.group
    rows = problem.batch * problem.q_len
    numbers = query_heads * (widths.dim_qk + widths.dim_v) + problem.heads * (widths.dim_qk + widths.dim_v)
    sent = numbers * rows * widths.element * (ranks - 1) // ranks**2
    latency = 2 * cluster.hop_latency_us if ranks > 1 else 0.0
    makespan = one_rank / ranks + cluster.transfer_us(sent) + latency
    return PeerEstimate("Ulysses", sent, sent, makespan, efficiency(one_rank, ranks, makespan))


def efficiency(one_rank: float, ranks: int, makespan: float) -> float:
    return one_rank / (ranks * makespan) if makespan else 1.0
