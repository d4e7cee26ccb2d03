"""Results as a JSON file, and the few numbers that sum them up."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .names import OURS, UNORDERED
from .shape import Shape

FORMAT = 1
Results = dict[str, Any]


def save(results: Results, path: Path) -> None:
    """Write aside, then rename: an interrupted benchmark leaves the shapes it finished."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(aside, path)


def read(path: Path) -> Results:
    try:
        results = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(results, dict) or results.get("format") != FORMAT or "rows" not in results:
        raise ValueError(f"{path} holds no benchmark results of format {FORMAT}")
    return results


def kind(row: dict[str, Any]) -> str:
    """What a panel or table has in common, in words: everything of a shape but its length."""
    return Shape.from_json(row["shape"]).kind


def is_schedule(candidate: str) -> bool:
    """Whether a candidate is one of the schedules that `--schedules` times."""
    return candidate.startswith(f"{OURS}: ")


def schedule_name(candidate: str) -> str:
    return candidate.removeprefix(f"{OURS}: ")


def unique(values: Iterable[Any]) -> list[Any]:
    """Each value once, in order of appearance."""
    return list(dict.fromkeys(values))


def summary(results: Results, path: Path) -> dict[str, Any]:
    """Geometric means over the shapes: ours over cuDNN per pass, and ordered over unordered."""
    ours = [row for row in results["rows"] if row["candidate"] == OURS]
    said: dict[str, Any] = {"path": str(path), "suite": results["suite"], "shapes": len({json.dumps(row["shape"]) for row in ours})}
    for direction in ("forward", "backward"):
        for what in ("ratio_to_cudnn", "ratio_to_fastest_peer"):
            said[f"{direction}_{what}"] = _mean([row[what] for row in ours if row["pass"] == direction and row.get(what)])
    said["backward_ordered_over_unordered"] = _mean(_ordered_over_unordered(results["rows"]))
    said["failed"] = sum(row["status"] != "ok" for row in ours)
    if results.get("host"):
        said["host_us"] = {row["candidate"]: round(row["median_us"], 1) for row in results["host"] if row["status"] == "ok"}
    return said


def _ordered_over_unordered(rows: list[dict[str, Any]]) -> list[float]:
    times = {
        (row["candidate"], json.dumps(row["shape"])): row["median_ms"] for row in rows if row["pass"] == "backward" and "median_ms" in row
    }
    shapes = [shape for name, shape in times if name == OURS and (UNORDERED, shape) in times]
    return [times[UNORDERED, shape] / times[OURS, shape] for shape in shapes]


def _mean(ratios: list[float]) -> float | None:
    return round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 4) if ratios else None
