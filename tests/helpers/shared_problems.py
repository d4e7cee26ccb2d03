"""Random sequences that ranks share, from a seed."""

from __future__ import annotations

from random import Random
from typing import Any

from dash_attn import Prefix
from dash_attn.distributed import Sharding
from shared_cases import BF16, F16, F32, F64, Case, banded

TILE = 128  # rows; the longer one of the CPU backend


def random_sharding(random: Random, ranks: int, unit: int = TILE, most: int = 3) -> Sharding:
    """Chunks of any lengths in any order, two or three per rank; the last one ends anywhere."""
    owners = [rank for rank in range(ranks) for _ in range(random.randint(1, 2))]
    random.shuffle(owners)
    lengths = [unit * random.randint(1, most) for _ in owners]
    lengths[-1] -= random.choice([0, random.randint(1, unit - 1)])
    return Sharding(tuple(lengths), tuple(owners))


def random_call(random: Random, rows: int) -> dict[str, Any]:
    width = random.randint(1, rows)
    calls: list[dict[str, Any]] = [
        {"causal": True},
        {},
        {"window_size": (width, 0)},
        {"window_size": (width, random.randint(0, rows))},
        {"window_size": (-1, width)},
        {"mask": Prefix(width), "schedule": "alternating"},
        {"schedule": "alternating"},
    ]
    if rows % 64 == 0:
        calls.append({"mask": banded(rows, rows // 64), "schedule": "alternating"})
    return random.choice(calls)


def random_case(seed: int, ranks: int, heads: tuple[tuple[int, int], ...] = ((1, 1), (2, 2), (4, 2), (3, 1))) -> Case:
    """Its rows are few, whatever the number of ranks."""
    random = Random(f"{seed}/{ranks}")
    form = random.choice(["zigzag", "contiguous", "own"])
    own = random_sharding(random, ranks, most=2)
    each = TILE * (1 if ranks > 4 else random.randint(1, 2))
    rows = own.rows if form == "own" else each * ranks * (2 if form == "zigzag" else 1)
    return Case(
        ranks,
        rows,
        random.choice(heads),
        random.choice([(8, 8), (16, 8), (8, 24)]),
        batch=random.choice([1, 1, 2]),
        dtype=random.choice([F32, F32, BF16, F16, F64]),
        sharding=own if form == "own" else form,
        call={**random_call(random, rows), "softcap": random.choice([0.0, 0.0, 5.0]), "head_offset": random.choice([0, 0, 1, 4])},
    )


def wide_cases() -> dict[str, Case]:
    """For `make test-all`."""
    from dataclasses import replace

    cases = {}
    for seed in range(60):
        random, ranks = Random(seed), seed % 4 + 1
        case = random_case(seed, ranks, ((2, 2), (4, 4), (4, 2), (8, 4), (5, 5)))
        factors = [factor for factor in (1, 2, 3, 4) if ranks % factor == 0 and case.heads[1] % factor == 0]
        sinks, lse_gradient = random.random() < 0.5, random.random() < 0.5
        cases[f"random {seed}"] = replace(case, ulysses=random.choice(factors), sinks=sinks, lse_gradient=lse_gradient)
    own = Sharding((2176, 128), (0, 1))
    cases["parts"] = Case(2, 4608, (4, 2), (8, 8), call={"causal": True})
    cases["parts, full"] = Case(2, 2304, (3, 1), (8, 8), sharding=own, sinks=True)
    cases["parts, ulysses"] = Case(4, 3072, (8, 2), (8, 8), ulysses=2, call={"window_size": (500, 0)})
    return cases
