"""Our backward or forward relative to every other kernel, case by case, with the spread over processes."""

from __future__ import annotations

from statistics import median
from typing import Any, NamedTuple

from .names import OURS
from .results import Results, is_schedule, shape_of, unique
from .shape import Shape

Row = dict[str, Any]


class Ratio(NamedTuple):
    """Of speeds: above 1, ours is faster."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def ours_over(results: Results, direction: str) -> dict[Shape, dict[str, Ratio]]:
    """By shape, and by the name of the other kernel. A ratio is taken inside each process."""
    rows = [row for row in results["rows"] if row["pass"] == direction and "median_ms" in row and not is_schedule(row["candidate"])]
    found: dict[Shape, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(shape_of(row), {})[row["candidate"]] = row
    return {
        shape: {name: _ratio(by_name[OURS], row) for name, row in by_name.items() if name != OURS}
        for shape, by_name in found.items()
        if OURS in by_name
    }


def _ratio(ours: Row, other: Row) -> Ratio:
    ratios = [theirs / mine for mine, theirs in zip(_times(ours), _times(other), strict=True)]
    return Ratio(median(ratios), min(ratios), max(ratios))


def _times(row: Row) -> list[float]:
    return row.get("process_ms") or [row["median_ms"]]


def relative_table(results: Results, direction: str) -> tuple[list[str], list[list[str]]]:
    """Header and lines: cases below each other, kernels side by side."""
    found = ours_over(results, direction)
    names = unique(name for ratios in found.values() for name in ratios)
    lines = [[str(shape), *(str(ratios.get(name, "-")) for name in names)] for shape, ratios in found.items()]
    return ["", *names], lines
