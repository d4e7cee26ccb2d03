"""The schedules compared with each other: speed of the backward relative to our own unordered kernel, from a results file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...viewing.style import INK
from .names import OURS, UNORDERED
from .picture_style import (
    DASHED,
    HIGHLIGHT,
    OTHER_LOOK,
    SCHEDULE_LOOKS,
    check_format,
    finish,
    grid,
    in_known_order,
    label_outside,
    legend_below,
    write,
)
from .results import Results, is_schedule, kind, schedule_name, unique

AUTO, BASELINE = f"auto ({OURS}'s choice)", f"{UNORDERED} = 1"
COLUMNS = 5
BAND = "#9dbff2"
DODGE = 0.045  # of the way to the next length: schedules of equal speed stand side by side

Row = dict[str, Any]


def draw_schedules(results: Results, path: Path) -> None:
    """Draw every schedule that was timed; one that does not serve a mask is left out of its panels."""
    check_format(path)
    rows = relative_rows(results["rows"])
    if not any(is_schedule(row["candidate"]) for row in rows):
        raise ValueError(f"these results hold no schedules next to {UNORDERED!r} (bench --schedules times them): nothing to draw")
    write(path, lambda: _figure(results, rows))


def relative_rows(rows: list[Row]) -> list[Row]:
    """The backwards of auto and of each schedule, with their speed `relative` to the unordered kernel on the same shape."""
    timed = [row for row in rows if row["pass"] == "backward" and row.get("median_ms")]
    unordered = {json.dumps(row["shape"]): row["median_ms"] for row in timed if row["candidate"] == UNORDERED}
    kept = [row for row in timed if row["candidate"] == OURS or is_schedule(row["candidate"])]
    pairs = [(row, unordered.get(json.dumps(row["shape"]))) for row in kept]
    return [{**row, "relative": time / row["median_ms"]} for row, time in pairs if time]


def _figure(results: Results, rows: list[Row]) -> Any:
    panels = unique(kind(row) for row in rows)
    names = in_known_order({schedule_name(row["candidate"]) for row in rows if row["candidate"] != OURS})
    labels = [AUTO, BASELINE, *names]
    columns = COLUMNS if len(panels) > 1 else 2
    figure, axes = grid(len(panels), _title(results, rows), _note(), -(-len(labels) // columns), sharey="col")
    for column in range(axes.shape[1]):
        keys = panels[column :: axes.shape[1]]
        axes[0, column].set_ylim(*_limits([row["relative"] for row in rows if kind(row) in keys]))
    for place, key in zip(axes.flat, panels, strict=False):
        _panel(place, [row for row in rows if kind(row) == key], names, key)
    label_outside(axes, "speed relative to unordered", every_column=True)
    legend_below(figure, axes, labels, columns)
    return figure


def _limits(values: list[float]) -> tuple[float, float]:
    low, high = min(*values, 1.0), max(*values, 1.0)
    margin = 0.06 * (high - low) + 0.01
    return low - margin, high + margin


def _title(results: Results, rows: list[Row]) -> str:
    gpu = results["environment"]["gpu"].removeprefix("NVIDIA ")
    auto = [row["relative"] for row in rows if row["candidate"] == OURS]
    worst = min((row for row in rows if row["candidate"] != OURS), key=lambda row: float(row["relative"]))
    seen = f"{schedule_name(worst['candidate'])} falls to {worst['relative']:.2f}"
    if auto:
        seen = f"auto runs at {min(auto):.2f} to {max(auto):.2f} times the speed of unordered, {seen}"
    return f"The schedule decides what determinism costs on {gpu}: {seen}"


def _note() -> str:
    return "Backward, bf16, higher is faster. 1.0: determinism for free. Every schedule gives the same bits in every run"


def _panel(axes: Any, rows: list[Row], names: list[str], title: str) -> None:
    seqlens = sorted(unique(row["shape"]["seqlen"] for row in rows))
    axes.axhline(1.0, color=INK, linewidth=1.8, linestyle=DASHED, zorder=3, label=BASELINE)
    served = [name for name in names if any(schedule_name(row["candidate"]) == name for row in rows)]
    for name in (OURS, *served):
        shift = 0.0 if name == OURS else DODGE * (served.index(name) - (len(served) - 1) / 2)
        mine = [row for row in rows if schedule_name(row["candidate"]) == name]
        points = sorted((seqlens.index(row["shape"]["seqlen"]) + shift, row["relative"]) for row in mine)
        if points:
            axes.plot(*zip(*points, strict=True), **_style(name))
    finish(axes, seqlens, title)


def _style(name: str) -> dict[str, Any]:
    """Auto is a broad band behind: the schedule that it chose stays visible on it."""
    if name == OURS:
        ring = {"marker": "o", "markersize": 15, "markeredgecolor": HIGHLIGHT, "markeredgewidth": 2.2}
        return {"label": AUTO, "color": BAND, "linewidth": 9, "zorder": 2, **ring}
    colour, marker = SCHEDULE_LOOKS.get(name, OTHER_LOOK)
    drawn = {"linewidth": 1.8, "markersize": 7, "markeredgecolor": "white", "markeredgewidth": 0.7, "zorder": 4}
    return {"label": name, "color": colour, "marker": marker, **drawn}
