"""A suite of cases that form no grid: one row per case, one dot per kernel, relative to the fastest kernel that is not ours."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from ...viewing.style import INK
from .names import EQUAL_HEADS, OURS, UNORDERED, is_ours
from .picture import PALE, PEERS
from .picture_style import DASHED, GRID, HIGHLIGHT, check_format, write
from .results import Results, case_names, is_schedule, shape_of, unique

ROW, TOP, BOTTOM, LEGEND_LINE = 0.52, 1.05, 0.75, 0.3  # inches
TITLES = {"masks": " under masks", "ranks": " at shapes of ranks", "decode": " on caches"}
WIDTH, COLUMNS = 12.4, 3
LEFT, LETTERS = 0.36, 46  # share of the width and letters of a line that the names of cases get

Row = dict[str, Any]


def draw_cases(results: Results, path: Path, direction: str = "backward") -> None:
    check_format(path)
    rows = [row for row in results["rows"] if row["pass"] == direction and row.get("ratio_to_fastest_peer")]
    rows = [row for row in rows if not is_schedule(row["candidate"])]
    if not rows:
        raise ValueError(f"these results hold no {direction} speeds of ours next to another kernel: nothing to draw")
    write(path, lambda: _figure(results, rows, direction))


def _figure(results: Results, rows: list[Row], direction: str) -> Any:
    from matplotlib.figure import Figure

    cases, names = case_names(rows), unique(row["candidate"] for row in rows)
    places = {shape: place for place, shape in enumerate(cases)}
    bottom = BOTTOM + LEGEND_LINE * -(-len(names) // COLUMNS)
    height = TOP + ROW * len(cases) + bottom
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.subplots()
    figure.subplots_adjust(LEFT, bottom / height, 0.985, 1 - TOP / height)
    axes.axvline(1.0, color=INK, linewidth=1.6, linestyle=DASHED, zorder=2)
    for name in names:
        mine = [row for row in rows if row["candidate"] == name]
        heights = [places[shape_of(row)] for row in mine]
        axes.scatter([row["ratio_to_fastest_peer"] for row in mine], heights, label=name, **dot_style(name, names))
    axes.set_yticks(range(len(cases)), [wrapped(name) for name in cases.values()], size=11.5, linespacing=1.05)
    axes.set_ylim(len(cases) - 0.5, -0.5)
    axes.set_xlim(0, None)
    axes.tick_params(axis="y", length=0)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_xlabel("speed relative to the fastest other kernel")
    figure.text(0.012, 1 - 0.12 / height, _title(results, rows, direction), size=16, weight="bold", va="top")
    note = "Circles: ours. Every kernel passed its check on the case; one that cannot run a case is not in its row"
    figure.text(0.012, 1 - 0.55 / height, note, size=12, va="top")
    figure.legend(loc="lower center", ncols=COLUMNS, frameon=False, columnspacing=1.6)
    return figure


def wrapped(case: str) -> str:
    """No line ends inside `2 x 8192`."""
    lines = textwrap.wrap(case.replace(" x ", "\N{NO-BREAK SPACE}x\N{NO-BREAK SPACE}"), LETTERS)
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")


def _title(results: Results, rows: list[Row], direction: str) -> str:
    gpu = results["environment"]["gpu"].removeprefix("NVIDIA ")
    ours = [row["ratio_to_fastest_peer"] for row in rows if row["candidate"] == OURS]
    seen = f": {min(ours):.2f} to {max(ours):.2f} times the fastest other kernel" if ours else ""
    return f"{OURS}{TITLES.get(results['suite'], '')}, {direction} on {gpu}{seen}"


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
