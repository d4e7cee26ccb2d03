"""Pictures of cases that form no grid: one row per case, one dot per kernel. Speeds relative to others, or what a sustained run shows."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dash_attn.tools.bench.candidates import EQUAL_HEADS, OURS, UNORDERED, is_ours
from dash_attn.tools.bench.report import Results, Row, shape_of, unique
from dash_attn.tools.calibrate.pictures import GRID, write
from dash_attn.viewing.style import INK

from .pictures import DASHED, HIGHLIGHT, PALE, PEERS
from .result_files import case_names, is_schedule

ROW, TOP, BOTTOM, LEGEND_LINE = 0.52, 1.05, 0.75, 0.3  # inches
TITLES = {"masks": " under masks", "ranks": " at shapes of ranks", "decode": " on caches"}
COLUMNS = 3
LETTERS = 46  # of a line of the names of cases
RELATIVE: dict[str, Callable[[Row], float]] = {"speed relative to the fastest other kernel": lambda row: row["ratio_to_fastest_peer"]}
SUSTAINED: dict[str, Callable[[Row], float]] = {
    "TFLOP/s": lambda row: row["sustained"]["tflops"],
    "GFLOP per joule": lambda row: 1000 * row["sustained"]["tflops"] / row["sustained"]["watts"],
}


def draw_cases(results: Results, path: Path, direction: str = "backward") -> None:
    """Relative to the fastest kernel that is not ours."""
    rows = [row for row in _of_pass(results, direction) if row.get("ratio_to_fastest_peer")]
    if not rows:
        raise ValueError(f"these results hold no {direction} speeds of ours next to another kernel: nothing to draw")
    write(path, lambda: cases_figure(results, rows, direction))


def draw_sustained(results: Results, path: Path, direction: str = "backward") -> None:
    """Speed on the left, work per joule on the right."""
    rows = [row for row in _of_pass(results, direction) if "sustained" in row]
    if not rows:
        raise ValueError(f"these results hold no sustained {direction}: nothing to draw")
    write(path, lambda: sustained_figure(results, rows, direction))


def _of_pass(results: Results, direction: str) -> list[Row]:
    return [row for row in results["rows"] if row["pass"] == direction and not is_schedule(row["candidate"])]


def cases_figure(results: Results, rows: list[Row], direction: str) -> Any:
    ours = [row["ratio_to_fastest_peer"] for row in rows if row["candidate"] == OURS]
    seen = f": {min(ours):.2f} to {max(ours):.2f} times the fastest other kernel" if ours else ""
    title = f"{OURS}{TITLES.get(results['suite'], '')}, {direction} on {_gpu(results)}{seen}"
    note = "Circles: ours. Every kernel passed its check on the case; one that cannot run a case is not in its row"
    figure = _dots(rows, RELATIVE, (12.4, 0.36), (title, note))
    figure.axes[0].axvline(1.0, color=INK, linewidth=1.6, linestyle=DASHED, zorder=2)
    return figure


def sustained_figure(results: Results, rows: list[Row], direction: str) -> Any:
    watts = [row["sustained"]["watts"] for row in rows]
    seconds = max(row["sustained"]["seconds"] for row in rows)
    title = f"{OURS}, {direction} for {seconds:g} s on {_gpu(results)}, at {min(watts):.0f} to {max(watts):.0f} W"
    return _dots(rows, SUSTAINED, (14.0, 0.324), (title, "Every kernel by itself, without a pause. Circles: ours"))


def _gpu(results: Results) -> str:
    return str(results["environment"]["gpu"].removeprefix("NVIDIA "))


def _dots(rows: list[Row], measures: dict[str, Callable[[Row], float]], size: tuple[float, float], texts: tuple[str, str]) -> Any:
    """Axes side by side, one per measure. size: the width in inches, and the share of it that names of cases get."""
    from matplotlib.figure import Figure

    cases, names = case_names(rows), unique(row["candidate"] for row in rows)
    (width, left), bottom = size, BOTTOM + LEGEND_LINE * -(-len(names) // COLUMNS)
    height = TOP + ROW * len(cases) + bottom
    figure = Figure(figsize=(width, height))
    side_by_side = figure.subplots(1, len(measures), sharey=True, squeeze=False)[0]
    figure.subplots_adjust(left, bottom / height, 0.985, 1 - TOP / height, 0.08)
    side_by_side[0].set_yticks(range(len(cases)), [wrapped(name) for name in cases.values()], size=11.5, linespacing=1.05)
    side_by_side[0].set_ylim(len(cases) - 0.5, -0.5)
    for number, (axes, (label, value)) in enumerate(zip(side_by_side, measures.items(), strict=True)):
        for name in names:
            mine = [row for row in rows if row["candidate"] == name]
            heights = [list(cases).index(shape_of(row)) for row in mine]
            axes.scatter([value(row) for row in mine], heights, label=None if number else name, **dot_style(name, names))
        axes.set_xlim(0, 1.05 * axes.dataLim.x1)  # room for half a dot
        axes.tick_params(axis="y", length=0)
        axes.grid(color=GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.set_xlabel(label)
    figure.text(0.012, 1 - 0.12 / height, texts[0], size=16, weight="bold", va="top")
    figure.text(0.012, 1 - 0.55 / height, texts[1], size=12, va="top")
    figure.legend(loc="lower center", ncols=COLUMNS, frameon=False, columnspacing=1.6)
    return figure


def wrapped(case: str) -> str:
    """No line ends inside `2 x 8192`."""
    lines = textwrap.wrap(case.replace(" x ", "\N{NO-BREAK SPACE}x\N{NO-BREAK SPACE}"), LETTERS)
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")


def dot_style(name: str, names: list[str]) -> dict[str, Any]:
    """Ours in front and round; a kernel and its deterministic mode share a colour, filled is deterministic."""
    if name == EQUAL_HEADS:
        return {"s": 110, "marker": "o", "facecolor": "none", "edgecolor": HIGHLIGHT, "linewidth": 1.6, "zorder": 5}
    if name in (OURS, UNORDERED):
        colour = HIGHLIGHT if name == OURS else PALE
        return {"s": 150 if name == OURS else 70, "marker": "o", "color": colour, "edgecolor": "white", "zorder": 6 if name == OURS else 5}
    family = unique(other.removesuffix(" deterministic") for other in names if not is_ours(other))
    colour = PEERS[family.index(name.removesuffix(" deterministic")) % len(PEERS)]
    filled = colour if name.endswith(" deterministic") else "none"
    return {"s": 60, "marker": "s", "facecolor": filled, "edgecolor": colour, "linewidth": 1.8, "zorder": 4}
