"""Sustained runs: one row per case, one dot per kernel; speed on the left, work per joule on the right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .names import OURS
from .picture_cases import BOTTOM, COLUMNS, LEFT, LEGEND_LINE, ROW, TOP, dot_style, wrapped
from .picture_style import GRID, check_format, write
from .results import Results, case_names, is_schedule, shape_of, unique

WIDTH = 14.0  # inches
Row = dict[str, Any]


def draw_sustained(results: Results, path: Path, direction: str = "backward") -> None:
    check_format(path)
    rows = [row for row in results["rows"] if row["pass"] == direction and "sustained" in row and not is_schedule(row["candidate"])]
    if not rows:
        raise ValueError(f"these results hold no sustained {direction}: nothing to draw")
    write(path, lambda: _figure(results, rows, direction))


def _figure(results: Results, rows: list[Row], direction: str) -> Any:
    from matplotlib.figure import Figure

    cases, names = case_names(rows), unique(row["candidate"] for row in rows)
    bottom = BOTTOM + LEGEND_LINE * -(-len(names) // COLUMNS)
    height = TOP + ROW * len(cases) + bottom
    figure = Figure(figsize=(WIDTH, height))
    speed, work = figure.subplots(1, 2, sharey=True)
    figure.subplots_adjust(LEFT * 0.9, bottom / height, 0.985, 1 - TOP / height, 0.08)
    places = {shape: place for place, shape in enumerate(cases)}
    for name in names:
        mine = [row for row in rows if row["candidate"] == name]
        heights = [places[shape_of(row)] for row in mine]
        looks = dot_style(name, names)
        speed.scatter([row["sustained"]["tflops"] for row in mine], heights, label=name, **looks)
        work.scatter([1000 * row["sustained"]["tflops"] / row["sustained"]["watts"] for row in mine], heights, **looks)
    speed.set_yticks(range(len(cases)), [wrapped(name) for name in cases.values()], size=11.5, linespacing=1.05)
    speed.set_ylim(len(cases) - 0.5, -0.5)
    for axes, label in ((speed, "TFLOP/s"), (work, "GFLOP per joule")):
        axes.set_xlim(0, 1.05 * axes.dataLim.x1)  # room for half a dot
        axes.tick_params(axis="y", length=0)
        axes.grid(color=GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.set_xlabel(label)
    figure.text(0.012, 1 - 0.12 / height, _title(results, rows, direction), size=16, weight="bold", va="top")
    figure.text(0.012, 1 - 0.55 / height, "Every kernel by itself, without a pause. Circles: ours", size=12, va="top")
    figure.legend(loc="lower center", ncols=COLUMNS, frameon=False, columnspacing=1.6)
    return figure


def _title(results: Results, rows: list[Row], direction: str) -> str:
    gpu = results["environment"]["gpu"].removeprefix("NVIDIA ")
    watts = [row["sustained"]["watts"] for row in rows]
    seconds = max(row["sustained"]["seconds"] for row in rows)
    return f"{OURS}, {direction} for {seconds:g} s on {gpu}, at {min(watts):.0f} to {max(watts):.0f} W"
