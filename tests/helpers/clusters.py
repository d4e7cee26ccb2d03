"""Shared schedules and clusters for tests of the simulated cluster."""

from __future__ import annotations

import math
import random

from dash_attn import parse_mask
from dash_attn.scheduling import Problem, generate
from dash_attn.scheduling.ranks.sharding import Sharding
from dash_attn.scheduling.ranks.share import share
from dash_attn.scheduling.ranks.units import SharedSchedule
from dash_attn.simulation import Machine
from dash_attn.simulation.cluster import Cluster

BLOCKS = Machine(compute=1, reduce=0)  # in the chunk model: work alone


def shared(
    mask: str, rows: int, ranks: int, heads: int, sharding: str = "zigzag", together: int = 1, schedule: str = "auto", **rest: int
) -> SharedSchedule:
    problem = Problem(parse_mask(mask), rows, rows, **{"tile_q": 64, "tile_kv": 128, **rest}, heads=heads)
    return share(generate(schedule, problem, 132), Sharding.named(sharding, rows, ranks), together)


def blocks(hop: float = 0.0) -> Cluster:
    """One worker per rank: units are blocks of work, whoever has them. Links of any width."""
    return Cluster(BLOCKS, workers=1, hop_latency_us=hop, bandwidth_GBs=math.inf)


def random_shared(seed: int) -> SharedSchedule:
    rng = random.Random(seed)
    ranks, sharding = rng.choice((1, 2, 3, 4, 5)), rng.choice(("zigzag", "contiguous"))
    rows = 128 * ranks * (2 if sharding == "zigzag" else 1) * rng.choice((1, 2, 3))
    mask = rng.choice(("causal", f"window:{rng.choice((100, 400, 1500))},0", *(["full"] if ranks > 1 else [])))
    tile_q, tile_kv = rng.choice(((64, 128), (128, 128), (64, 64)))
    many = {"group": rng.choice((1, 2, 5)), "batch": rng.choice((1, 2)), "tile_q": tile_q, "tile_kv": tile_kv}
    return shared(mask, rows, ranks, rng.choice((1, 2, 3, 4)), sharding, rng.choice((1, 2, 3)), **many)
