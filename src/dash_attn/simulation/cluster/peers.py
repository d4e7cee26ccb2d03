"""Ring attention and Ulysses on the same cluster: models of what they must send and compute, never measurements.

Both compute a task as fast as one device does on average, and neither pays for launches. So they are shown at their best. Neither has
bits that are independent of the number of devices in the way that dash-attn has: ring attention adds dQ in another order for each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...scheduling.devices.sharding import Sharding
from ...scheduling.problem import Problem
from .machines import STATE_BYTES, Cluster


@dataclass(frozen=True)
class PeerEstimate:
    """`forward_bytes` and `backward_bytes` are what a device sends; `makespan` is of the backward, in microseconds."""

    name: str
    forward_bytes: int
    backward_bytes: int
    makespan: float
    efficiency: float


def ring_attention(problem: Problem, sharding: Sharding, cluster: Cluster, one_device: float) -> PeerEstimate:
    """P steps. In step s device p works on the keys of device p - s; K and V go on to the next device meanwhile, and so do the float32
    dK and dV, which need one more turn to come home. A step takes the longest compute of any device or the transfer, whichever is
    longer. Rows are dealt as for dash-attn.
    """
    devices = sharding.devices
    rows = max(len(sharding.rows_of(device)) for device in range(devices))
    heads = problem.heads * problem.batch
    keys = heads * cluster.widths.keys(rows)
    sums = heads * rows * (cluster.widths.dim_qk + cluster.widths.dim_v) * STATE_BYTES
    per_task = one_device / max(1, problem.tasks)
    steps = _ring_tasks(problem, sharding)
    makespan = 0.0
    for step, tasks in enumerate(steps):
        # dK and dV of a step leave behind its compute, so that they travel beside the next one.
        size = (keys if step < devices - 1 else 0) + (sums if step else 0)
        transfer = cluster.transfer_us(size) + cluster.hop_latency_us if devices > 1 and size else 0.0
        makespan += max(tasks * per_task, transfer)
    if devices > 1:
        makespan += cluster.transfer_us(sums) + cluster.hop_latency_us  # the last turn, home
    sent = (devices - 1) * keys, (devices - 1) * keys + (devices * sums if devices > 1 else 0)
    return PeerEstimate("ring attention", *sent, makespan, _efficiency(one_device, devices, makespan))


def _ring_tasks(problem: Problem, sharding: Sharding) -> list[int]:
    """Tasks of the busiest device in each step."""
    devices = sharding.devices
    of_q, of_kv = (np.array(sharding.owners)[sharding.chunk_of_tiles(tile)] for tile in (problem.tile_q, problem.tile_kv))
    q_tile, kv_tile = np.nonzero(problem.kept)
    met = np.zeros((devices, devices), dtype=np.int64)  # device of the queries, device of the keys
    np.add.at(met, (of_q[q_tile], of_kv[kv_tile]), problem.group * problem.heads * problem.batch)
    there = np.arange(devices)
    return [int(met[there, (there - step) % devices].max()) for step in range(devices)]


def ulysses(problem: Problem, sharding: Sharding, cluster: Cluster, one_device: float) -> PeerEstimate | str:
    """All-to-all of q, k, v and out over the heads, whole heads on each device, all-to-all back: of dout before the backward and of dq,
    dk and dv behind it. Nothing is hidden behind compute. Needs KV heads that P divides; else the reason is returned.
    """
    devices, widths = sharding.devices, cluster.widths
    if problem.heads % devices:
        return f"needs a number of KV heads that {devices} devices divide; got {problem.heads}"
    query_heads = problem.heads * problem.group
    rows = problem.batch * problem.q_len
    numbers = query_heads * (widths.dim_qk + widths.dim_v) + problem.heads * (widths.dim_qk + widths.dim_v)
    sent = numbers * rows * widths.element * (devices - 1) // devices**2
    latency = 2 * cluster.hop_latency_us if devices > 1 else 0.0
    makespan = one_device / devices + cluster.transfer_us(sent) + latency
    return PeerEstimate("Ulysses", sent, sent, makespan, _efficiency(one_device, devices, makespan))


def _efficiency(one_device: float, devices: int, makespan: float) -> float:
    return one_device / (devices * makespan) if makespan else 1.0
