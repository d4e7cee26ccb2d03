"""Boolean matrices in a report: the speed of their tiles beside those of a full mask, and what a new one costs the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .matrices import Matrix
from .names import OURS
from .results import Results, shape_of
from .shape import Shape

Cells = list[list[str]]
COSTS = {"mask": "BooleanMask", "forward": "first forward", "backward": "first backward", "elements": "elements alone"}


def tile_rates(results: Results) -> tuple[list[str], Cells]:
    """TFLOP/s of kept tiles over those of all tiles, by pass."""
    speeds = {(shape_of(row), row["pass"]): row["tflops"] for row in _ours(results) if row["status"] == "ok"}
    rates: dict[Shape, dict[str, str]] = {}
    for (shape, direction), speed in speeds.items():
        full = speeds.get((replace(shape, mask="full"), direction))
        if isinstance(shape.attended, Matrix) and full:
            rates.setdefault(shape, {})[direction] = f"{speed / full:.2f}"
    return ["", "forward", "backward"], [[str(s), *(of.get(name, "-") for name in ("forward", "backward"))] for s, of in rates.items()]


def planning_costs(results: Results) -> tuple[list[str], Cells]:
    """Milliseconds."""
    found = {str(shape_of(row)): row["identity"]["planning_ms"] for row in _ours(results) if "planning_ms" in row.get("identity", {})}
    return ["", *COSTS.values()], [[name, *(f"{costs[key]:.1f}" for key in COSTS)] for name, costs in found.items()]


def _ours(results: Results) -> list[dict[str, Any]]:
    return [row for row in results["rows"] if row["candidate"] == OURS]
