"""How far the simulator is off, schedule by schedule: one row each, one dot per shape."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median
from typing import Any

from ...viewing.style import INK
from .picture_prediction import BAND, CLOSE, Row
from .picture_style import GRID, OTHER_LOOK, SCHEDULE_LOOKS, in_known_order, write

SPREAD = 0.13  # of a row, between two lines of dots
ROW, TOP, BOTTOM = 0.62, 1.05, 0.8  # inches
WIDTH = 10.4
NOTE = "Error of the predicted time; left of 0 the kernel took longer. A dot is a shape, the bar their median. Shaded: within 10 %"


def draw_errors(prediction: dict[str, Any], path: Path) -> None:
    write(path, lambda: figure_of(prediction))


def figure_of(prediction: dict[str, Any]) -> Any:
    from matplotlib.figure import Figure

    errors = by_schedule(prediction["rows"])
    height = TOP + ROW * len(errors) + BOTTOM
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.subplots()
    figure.subplots_adjust(0.19, BOTTOM / height, 0.74, 1 - TOP / height)
    axes.axvspan(-100 * CLOSE, 100 * CLOSE, color=BAND, zorder=0)
    axes.axvline(0, color=INK, linewidth=1.2, zorder=1)
    for row, (name, found) in enumerate(errors.items()):
        _row(axes, row, name, found)
    axes.set_yticks(range(len(errors)), list(errors))
    axes.set_ylim(len(errors) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("predicted / measured \N{MINUS SIGN} 1 (%)")
    axes.grid(axis="x", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    figure.text(0.012, 1 - 0.12 / height, _title(prediction), size=16, weight="bold", va="top")
    figure.text(0.012, 1 - 0.5 / height, NOTE, size=11, va="top")
    return figure


def by_schedule(rows: list[Row]) -> dict[str, list[float]]:
    """Errors in per cent."""
    names = in_known_order({row["schedule"] for row in rows})
    return {name: [100 * row["error"] for row in rows if row["schedule"] == name] for name in names}


def _row(axes: Any, row: int, name: str, errors: list[float]) -> None:
    """Dots in lines above each other, so that equal errors stay visible."""
    colour, marker = SCHEDULE_LOOKS.get(name, OTHER_LOOK)
    lines = [row + SPREAD * ((i % 3) - 1) for i in range(len(errors))]
    axes.scatter(sorted(errors), lines, s=48, color=colour, marker=marker, edgecolor="white", linewidth=0.6, zorder=4)
    middle = median(errors)
    axes.plot([middle, middle], [row - 0.34, row + 0.34], color=INK, linewidth=2.4, zorder=5)
    worst = max(errors, key=abs)
    text = f"median {middle:+.1f} %, worst {worst:+.0f} %".replace("-", "\N{MINUS SIGN}")
    axes.text(1.02, row, text, transform=axes.get_yaxis_transform(), va="center", size=11.5, color=INK)


def _title(prediction: dict[str, Any]) -> str:
    gpu = prediction["gpu"].removeprefix("NVIDIA ")
    sizes = [abs(row["error"]) for row in prediction["rows"]]
    return f"The simulator on {gpu}: off by {100 * median(sizes):.1f} % in the median of {len(sizes)} runs, {100 * _rms(sizes):.1f} % rms"


def _rms(values: list[float]) -> float:
    return math.sqrt(sum(v * v for v in values) / len(values))
