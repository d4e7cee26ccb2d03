"""Pictures of results over sequence length, one panel per head dim and mask: relative to cuDNN, and our schedules among each other."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from dash_attn.tools.bench.candidates import CUDNN, OURS, UNORDERED
from dash_attn.tools.bench.report import Results, Row, kind, unique
from dash_attn.tools.calibrate.pictures import GRID, OTHER_LOOK, SCHEDULE_LOOKS, in_known_order, thousands, write
from dash_attn.viewing.style import INK

from .result_files import is_schedule, schedule_name

HIGHLIGHT, PALE, BAND = "#0b57d0", "#6f9fe8", "#9dbff2"
PEERS = ("#d55e00", "#009e73", "#882255", "#e69f00", "#cc79a7")
DASHED = (0, (4, 2))
BASELINE, AUTO, UNORDERED_BASELINE = f"{CUDNN} = 1", f"auto ({OURS}'s choice)", f"{UNORDERED} = 1"
COLUMNS = 5  # of a legend
SCHEDULES_NOTE = "Backward, bf16, higher is faster. 1.0: determinism for free. Every schedule gives the same bits in every run"
DODGE = 0.045  # of the way to the next length: schedules of equal speed stand side by side

# Inches. Margins are fixed, so that a title, a note and a legend have their room whatever the number of panels.
PANEL_WIDTH, PANEL_HEIGHT = 5.3, 3.1
LEFT, RIGHT, GAP, ROW_GAP = 0.85, 0.2, 0.85, 0.7
TITLE_LINE, NOTE_LINE, LEGEND_LINE = 0.31, 0.26, 0.3
TITLE_SIZE, TITLE_LETTER, NOTE_SIZE, NOTE_LETTER = 17, 0.155, 13, 0.108


def grid(panels: int, title: str, note: str, legend_lines: int, sharey: Literal["col", "all"]) -> tuple[Any, Any]:
    """A figure and its axes, two panels in a row, below a title and a note and above room for a legend."""
    from matplotlib.figure import Figure

    columns = min(2, panels)
    rows = -(-panels // columns)
    width = LEFT + columns * PANEL_WIDTH + (columns - 1) * GAP + RIGHT
    titles, notes = (textwrap.wrap(text, int((width - 0.2) / letter)) for text, letter in ((title, TITLE_LETTER), (note, NOTE_LETTER)))
    top = 0.12 + TITLE_LINE * len(titles) + NOTE_LINE * len(notes) + 0.5
    bottom = 0.8 + LEGEND_LINE * legend_lines
    height = top + rows * PANEL_HEIGHT + (rows - 1) * ROW_GAP + bottom
    figure = Figure(figsize=(width, height))
    axes = figure.subplots(rows, columns, squeeze=False, sharey=sharey)
    figure.subplots_adjust(LEFT / width, bottom / height, 1 - RIGHT / width, 1 - top / height, GAP / PANEL_WIDTH, ROW_GAP / PANEL_HEIGHT)
    left = 0.12 / width
    figure.text(left, 1 - 0.12 / height, "\n".join(titles), size=TITLE_SIZE, weight="bold", va="top", linespacing=1.2)
    below = 0.12 + TITLE_LINE * len(titles) + 0.03
    figure.text(left, 1 - below / height, "\n".join(notes), size=NOTE_SIZE, va="top", linespacing=1.2)
    for place in axes.flat[panels:]:
        place.set_visible(False)
    return figure, axes


def finish(axes: Any, seqlens: list[int], title: str) -> None:
    """Lengths below a panel, a quiet grid, and its title."""
    axes.set_xticks(range(len(seqlens)), [thousands(n) for n in seqlens])
    axes.margins(x=0.05)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_title(title)


def label_outside(axes: Any, ylabel: str, every_column: bool = False) -> None:
    for place in axes.flat if every_column else axes[:, 0]:
        place.set_ylabel(ylabel)
    for place in axes[-1]:
        place.set_xlabel("sequence length")


def legend_below(figure: Any, axes: Any, labels: Iterable[str], columns: int) -> None:
    """One legend for all panels, in the order of `labels`."""
    found: dict[str, Any] = {}
    for place in axes.flat:
        for handle, label in zip(*place.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    shown = [label for label in labels if label in found]
    handles = [found[label] for label in shown]
    figure.legend(handles, shown, loc="lower center", ncols=columns, frameon=False, handlelength=2.4, columnspacing=1.6)


# ---- ours and the peers, relative to cuDNN


def draw(results: Results, path: Path, direction: str = "backward") -> None:
    """Draw one pass of a results file: ours and the peers, without the schedules compared among each other."""
    rows = [row for row in results["rows"] if row["pass"] == direction and row.get("ratio_to_cudnn") and not is_schedule(row["candidate"])]
    if not rows:
        raise ValueError(f"these results hold no {direction} speeds next to {CUDNN}: nothing to draw")
    write(path, lambda: _figure(results, rows, direction))


def _figure(results: Results, rows: list[Row], direction: str) -> Any:
    panels = unique(kind(row) for row in rows)
    styles = _styles(rows, direction)
    columns = COLUMNS if len(panels) > 1 else 2
    labels = [*(name for name in (OURS, UNORDERED) if name in styles), BASELINE, *(n for n in styles if n not in (OURS, UNORDERED, CUDNN))]
    note = _note(rows, direction)
    figure, axes = grid(len(panels), _title(results, rows, direction), note, -(-len(labels) // columns), sharey="all")
    axes[0, 0].set_ylim(*_limits([row["ratio_to_cudnn"] for row in rows]))
    for place, key in zip(axes.flat, panels, strict=False):
        _panel(place, [row for row in rows if kind(row) == key], styles, key)
    label_outside(axes, f"speed relative to {CUDNN}")
    legend_below(figure, axes, labels, columns)
    return figure


def _limits(ratios: list[float]) -> tuple[float, float]:
    """Tight, but with room for the widest marker."""
    return max(0.0, math.floor(10 * min(*ratios, 1.0) - 0.3) / 10), max(*ratios, 1.0) + 0.05


def _title(results: Results, rows: list[Row], direction: str) -> str:
    gpu = results["environment"]["gpu"].removeprefix("NVIDIA ")
    ours = [row["ratio_to_cudnn"] for row in rows if row["candidate"] == OURS]
    if not ours:
        return f"Attention {direction} on {gpu}"
    kind = f"{OURS}, reproducible backward" if direction == "backward" else f"{OURS}, forward"
    return f"{kind} on {gpu}: {min(ours):.2f} to {max(ours):.2f} times the speed of {CUDNN}"


def _note(rows: list[Row], direction: str) -> str:
    tokens = unique(row["shape"]["batch"] * row["shape"]["seqlen"] for row in rows)
    note = ", ".join(["bf16", *(f"{n:,} tokens per batch" for n in tokens[:1] if len(tokens) == 1), "higher is faster"])
    return note if direction == "forward" else f"{note}. Solid: the same bits in every run. Dashed: not guaranteed"


def _styles(rows: list[Row], direction: str) -> dict[str, dict[str, Any]]:
    """Ours in front and thick, each peer in one colour; in a backward, dashed is not reproducible."""
    colours: dict[str, str] = {}
    styles: dict[str, dict[str, Any]] = {}
    for name, deterministic in unique((row["candidate"], row["deterministic"]) for row in rows):
        style: dict[str, Any] = {"linewidth": 2.0, "markersize": 6, "marker": "s", "zorder": 4}
        if name == OURS:
            style |= {"color": HIGHLIGHT, "linewidth": 3.6, "markersize": 9, "marker": "o", "zorder": 6}
        elif name == UNORDERED:
            style |= {"color": PALE, "marker": "o", "zorder": 5}
        elif name == CUDNN:
            style = {"color": INK, "linewidth": 1.6, "zorder": 2}
        else:
            style["color"] = colours.setdefault(name.removesuffix(" deterministic"), PEERS[len(colours) % len(PEERS)])
        styles[name] = {**style, "linestyle": "-" if deterministic or direction == "forward" else DASHED}
    return styles


def _panel(axes: Any, rows: list[Row], styles: dict[str, dict[str, Any]], title: str) -> None:
    seqlens = sorted(unique(row["shape"]["seqlen"] for row in rows))
    axes.axhline(1.0, label=BASELINE, **styles.get(CUDNN, {"color": INK}))
    for name, style in styles.items():
        mine = sorted((seqlens.index(row["shape"]["seqlen"]), row["ratio_to_cudnn"]) for row in rows if row["candidate"] == name)
        if mine and name != CUDNN:
            axes.plot(*zip(*mine, strict=True), label=name, **style)
    finish(axes, seqlens, title)


# ---- schedules, relative to our own unordered kernel


def draw_schedules(results: Results, path: Path) -> None:
    """Draw every schedule that was timed; one that does not serve a mask is left out of its panels."""
    rows = relative_rows(results["rows"])
    if not any(is_schedule(row["candidate"]) for row in rows):
        raise ValueError(f"these results hold no schedules next to {UNORDERED!r} (--schedules times them): nothing to draw")
    write(path, lambda: _schedules_figure(results, rows))


def relative_rows(rows: list[Row]) -> list[Row]:
    """The backwards of auto and of each schedule, with their speed `relative` to the unordered kernel on the same shape."""
    timed = [row for row in rows if row["pass"] == "backward" and row.get("median_ms")]
    unordered = {json.dumps(row["shape"]): row["median_ms"] for row in timed if row["candidate"] == UNORDERED}
    kept = [row for row in timed if row["candidate"] == OURS or is_schedule(row["candidate"])]
    pairs = [(row, unordered.get(json.dumps(row["shape"]))) for row in kept]
    return [{**row, "relative": time / row["median_ms"]} for row, time in pairs if time]


def _schedules_figure(results: Results, rows: list[Row]) -> Any:
    panels = unique(kind(row) for row in rows)
    names = in_known_order({schedule_name(row["candidate"]) for row in rows if row["candidate"] != OURS})
    labels = [AUTO, UNORDERED_BASELINE, *names]
    columns = COLUMNS if len(panels) > 1 else 2
    figure, axes = grid(len(panels), _schedules_title(results, rows), SCHEDULES_NOTE, -(-len(labels) // columns), sharey="col")
    for column in range(axes.shape[1]):
        keys = panels[column :: axes.shape[1]]
        axes[0, column].set_ylim(*_schedules_limits([row["relative"] for row in rows if kind(row) in keys]))
    for place, key in zip(axes.flat, panels, strict=False):
        _schedules_panel(place, [row for row in rows if kind(row) == key], names, key)
    label_outside(axes, "speed relative to unordered", every_column=True)
    legend_below(figure, axes, labels, columns)
    return figure


def _schedules_limits(values: list[float]) -> tuple[float, float]:
    low, high = min(*values, 1.0), max(*values, 1.0)
    margin = 0.06 * (high - low) + 0.01
    return low - margin, high + margin


def _schedules_title(results: Results, rows: list[Row]) -> str:
    gpu = results["environment"]["gpu"].removeprefix("NVIDIA ")
    auto = [row["relative"] for row in rows if row["candidate"] == OURS]
    worst = min((row for row in rows if row["candidate"] != OURS), key=lambda row: float(row["relative"]))
    seen = f"{schedule_name(worst['candidate'])} falls to {worst['relative']:.2f}"
    if auto:
        seen = f"auto runs at {min(auto):.2f} to {max(auto):.2f} times the speed of unordered, {seen}"
    return f"The schedule decides what determinism costs on {gpu}: {seen}"


def _schedules_panel(axes: Any, rows: list[Row], names: list[str], title: str) -> None:
    seqlens = sorted(unique(row["shape"]["seqlen"] for row in rows))
    axes.axhline(1.0, color=INK, linewidth=1.8, linestyle=DASHED, zorder=3, label=UNORDERED_BASELINE)
    served = [name for name in names if any(schedule_name(row["candidate"]) == name for row in rows)]
    for name in (OURS, *served):
        shift = 0.0 if name == OURS else DODGE * (served.index(name) - (len(served) - 1) / 2)
        mine = [row for row in rows if schedule_name(row["candidate"]) == name]
        points = sorted((seqlens.index(row["shape"]["seqlen"]) + shift, row["relative"]) for row in mine)
        if points:
            axes.plot(*zip(*points, strict=True), **_schedules_style(name))
    finish(axes, seqlens, title)


def _schedules_style(name: str) -> dict[str, Any]:
    """Auto is a broad band behind: the schedule that it chose stays visible on it."""
    if name == OURS:
        ring = {"marker": "o", "markersize": 15, "markeredgecolor": HIGHLIGHT, "markeredgewidth": 2.2}
        return {"label": AUTO, "color": BAND, "linewidth": 9, "zorder": 2, **ring}
    colour, marker = SCHEDULE_LOOKS.get(name, OTHER_LOOK)
    drawn = {"linewidth": 1.8, "markersize": 7, "markeredgecolor": "white", "markeredgewidth": 0.7, "zorder": 4}
    return {"label": name, "color": colour, "marker": marker, **drawn}
