"""Golden files: walks, ranks and start orders of every schedule on small problems, as last reviewed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from dash_attn import Problem, Schedule, ScheduleError, generate

FOLDER = Path(__file__).parents[1] / "golden"
UPDATE = "DASH_ATTN_UPDATE_GOLDEN"
WORKERS = 6

PROBLEMS = {
    "full 8x4": Problem.from_tiles("full", 8, 4, heads=2),
    "full 5x7": Problem.from_tiles("full", 5, 7, heads=2),
    "causal 8x4": Problem.from_tiles("causal", 8, 4, heads=2),
    "causal 7x7": Problem.from_tiles("causal", 7, 7, heads=2),
    "causal 4x9": Problem.from_tiles("causal", 4, 9, heads=2),
    "window 12x6": Problem.from_tiles("window:2,1", 12, 6, heads=2),
    "documents 10x10": Problem.from_tiles("documents:3,5,2", 10, 10, heads=2),
    "prefix 8x8": Problem.from_tiles("prefix:3", 8, 8, heads=2),
    "random 9x7": Problem.from_tiles(np.random.default_rng(7).random((9, 7)) < 0.5, 9, 7, heads=2),
    "dense column 40x40": Problem.from_tiles(np.eye(40, dtype=bool) | (np.arange(40) == 3), 40, 40),
}


def actual(name: str) -> dict[str, Any]:
    """What the generator makes today, for the problems it serves."""
    found = {}
    for case, problem in PROBLEMS.items():
        try:
            found[case] = _summary(generate(name, problem, WORKERS))
        except ScheduleError:
            found[case] = "refused"
    return found


def recorded(name: str) -> dict[str, Any]:
    path = FOLDER / f"{name}.json"
    if os.environ.get(UPDATE):
        path.write_text(_as_text(actual(name)))
    return json.loads(path.read_text())


def _summary(schedule: Schedule) -> dict[str, Any]:
    placement = schedule.placement
    kinds = [
        {
            "walks": [" ".join(map(str, kind.walk(kv))) for kv in range(kind.kv_tiles)],
            "ranks": [" ".join(map(str, kind.ranks(kv))) for kv in range(kind.kv_tiles)],
            "start": " ".join(map(str, start)),
        }
        for kind, start in zip(schedule.order.kinds, placement.starts, strict=True)
    ]
    return {"order": schedule.name, "kinds": kinds, "segments": list(placement.segments), "lanes": placement.lanes}


def _as_text(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=1) + "\n"
