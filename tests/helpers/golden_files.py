"""Golden files: orders and placements of every schedule, as last reviewed.

They hold whatever `order_hash` names (tiles, head offset, parts of a group, the number of kinds, walks, turns, last_member_first)
and the order in which chains start. A refresh has to be asked for: DASH_ATTN_UPDATE_GOLDEN=1.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cases import NAMES
from dash_attn import ScheduleError
from dash_attn.scheduling import Problem, Schedule, generate, lower
from golden_problems import SMALL, many

FOLDER = Path(__file__).parents[1] / "golden"
HASHES = FOLDER / "order_hashes.txt"
UPDATE = "DASH_ATTN_UPDATE_GOLDEN"
WORKERS = 6  # of the small problems
MANY_WORKERS = {name: (132, 23) if name == "shift" else (132,) for name in NAMES}  # the order of shift depends on them


def actual(name: str) -> dict[str, Any]:
    """What the generator makes today, for the problems it serves."""
    return {case: served(name, problem) for case, problem in SMALL.items()}


def recorded(name: str) -> dict[str, Any]:
    return json.loads(_file(FOLDER / f"{name}.json", lambda: json.dumps(actual(name), indent=1) + "\n"))


def actual_hashes() -> dict[str, str]:
    """`schedule workers | problem` and what it gives: the order's name, its hash, a hash of the tickets."""
    return dict(_hashes())


def recorded_hashes() -> dict[str, str]:
    text = _file(HASHES, lambda: "".join(f"{what} | {found}\n" for what, found in _hashes()))
    return dict(line.rsplit(" | ", 1) for line in text.splitlines())


def written_out(schedule: Schedule) -> dict[str, Any]:
    """A small schedule, in full."""
    problem, placement = schedule.problem, schedule.placement
    kinds = [
        {
            "last_member_first": kind.last_member_first,
            "walks": [" ".join(map(str, kind.walk(kv))) for kv in range(kind.kv_tiles)],
            "ranks": [" ".join(map(str, kind.turns(kv))) for kv in range(kind.kv_tiles)],
            "start": " ".join(map(str, start)),
        }
        for kind, start in zip(schedule.order.kinds, placement.starts, strict=True)
    ]
    return {
        "order": schedule.order.name,
        "order_hash": lower(schedule).order_hash,
        "tiles": f"{problem.tile_q}x{problem.tile_kv}",
        "head_offset": problem.head_offset,
        "parts": " ".join(str(len(problem.members(part))) for part in range(problem.parts)),
        "kinds": kinds,
        "segments": " ".join(map(str, placement.segments)),
        "lanes": placement.lanes,
        "heads_in_round": placement.heads_in_round,
    }


def served(name: str, problem: Problem) -> dict[str, Any] | str:
    try:
        return written_out(generate(name, problem, WORKERS))
    except ScheduleError:
        return "refused"


def _hashes() -> Iterator[tuple[str, str]]:
    for text, problem in many():
        for name, counts in MANY_WORKERS.items():
            for workers in counts:
                yield f"{name} {workers} | {text}", _hash_of(name, problem, workers)


def _hash_of(name: str, problem: Problem, workers: int) -> str:
    try:
        schedule = generate(name, problem, workers)
    except ScheduleError:
        return "refused"
    tickets = hashlib.sha256(schedule.tickets.astype(np.int64).tobytes()).hexdigest()[:8]
    return f"{schedule.name} {lower(schedule).order_hash} {tickets}"


def _file(path: Path, make: Callable[[], str]) -> str:
    if os.environ.get(UPDATE) == "1":
        path.write_text(make())
    if not path.exists():
        raise FileNotFoundError(f"{path.name} is not in {FOLDER}; {UPDATE}=1 writes it, to be read before it is committed")
    return path.read_text()
