"""Gantt charts of a cluster: ranks over time. A bar is a unit. Its colour tells the kind of its heads, its shade which heads.

The number in a bar is the chunk of its keys. The chunk of its queries is one of the rank's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..scheduling.ranks.units import Unit
from ..simulation.cluster import RankTimeline
from . import style as plot_style
from .style import FIGURE_WIDTH, IDLE, INK, text_colour
from .words import plain_number

STYLE: Any = {**plot_style.STYLE, "font.size": 10}
SHADES = ("Blues", "Oranges")  # of the two kinds of head: light, and different for colour-blind eyes
LIGHTEST, DARKEST = 0.32, 0.72
LANE = 0.84  # of the distance between ranks
GLYPH = 0.64  # width of a digit, in font sizes
SMALLEST_LABEL, LARGEST_LABEL = 5.0, 8.0
MOST_HOPS = 60  # more lines hide the bars
HOP = "#777777"
NUMBERS = "a number is the chunk whose keys a unit works on; shades tell the heads of one kind apart"
PLOT_SHARE = 0.9  # of the figure's width that the time axis takes


class _Bar(NamedTuple):
    unit: Unit
    start: float
    end: float
    lane: int  # on its rank


def gantt_of_ranks(runs: Sequence[RankTimeline], path: str | Path, title: str) -> None:
    """Draw runs below each other on one time axis and write the picture to `path` (.png or .svg)."""
    plot_style.check_format(path, "a Gantt chart")
    if not runs:
        raise ValueError("a Gantt chart needs at least one run")
    from matplotlib import rc_context

    with rc_context(STYLE):
        plot_style.save(_figure(runs, title), path)


def _figure(runs: Sequence[RankTimeline], title: str) -> Any:
    from matplotlib.figure import Figure

    row = 0.42 if runs[0].ranks <= 8 else 0.26
    heights = [row * run.ranks for run in runs]
    figure = Figure(figsize=(FIGURE_WIDTH, sum(heights) + 0.75 * len(runs) + 1.5), layout="constrained")
    all_axes = figure.subplots(len(runs), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    horizon = 1.015 * max(run.makespan for run in runs)
    for axes, run in zip(all_axes, runs, strict=True):
        _draw(axes, run, horizon)
    all_axes[-1].set_xlabel("microseconds")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color="#555555")
    _explain(figure, runs)
    return figure


def _draw(axes: Any, run: RankTimeline, horizon: float) -> None:
    axes.set_xlim(0, horizon)
    bars = _bars(run)
    _draw_idle(axes, run, bars)
    lanes = 1 + max((bar.lane for bar in bars), default=0)
    colours = _colours(run)
    for bar in bars:
        _draw_bar(axes, bar, lanes, colours[bar.unit.kind, bar.unit.heads])
    _label(axes, run, bars, lanes, colours, horizon)
    _draw_hops(axes, run, bars, lanes)
    _dress(axes, run)


def _bars(run: RankTimeline) -> list[_Bar]:
    """Of all legs. Units of a rank that overlap get lanes of their own. Endings take no time worth a bar."""
    bars: list[_Bar] = []
    for units in run.shared.by_rank:
        free: list[float] = []
        for unit in sorted((unit for unit in units if unit.leg is not None), key=lambda unit: run.start[unit.number]):
            start, end = float(run.start[unit.number]), float(run.end[unit.number])
            lane = next((lane for lane, until in enumerate(free) if until <= start), len(free))
            free[lane : lane + 1] = [end]
            bars.append(_Bar(unit, start, end, lane))
    return bars


def _draw_idle(axes: Any, run: RankTimeline, bars: list[_Bar]) -> None:
    """Where a rank has no unit at all."""
    for rank in range(run.ranks):
        until = 0.0
        gaps: list[tuple[float, float]] = []
        for bar in sorted((bar for bar in bars if bar.unit.rank == rank), key=lambda bar: bar.start):
            gaps += [(until, bar.start - until)] if bar.start > until else []
            until = max(until, bar.end)
        gaps.append((until, run.makespan - until))
        axes.broken_barh(gaps, (rank - LANE / 2, LANE), facecolors=IDLE, linewidth=0, zorder=1)


def _colours(run: RankTimeline) -> dict[tuple[int, Any], NDArray[np.float64]]:
    """By kind and heads: one shade after the other, in the order of their turns."""
    from matplotlib import colormaps

    found: dict[tuple[int, Any], NDArray[np.float64]] = {}
    for kind in sorted({unit.kind for unit in run.shared.units}):
        turns = sorted({unit.heads for unit in run.shared.units if unit.kind == kind})
        shades = np.linspace(LIGHTEST, DARKEST, len(turns)) if len(turns) > 1 else [(LIGHTEST + DARKEST) / 2]
        colours = np.asarray(colormaps[SHADES[kind % len(SHADES)]](shades), dtype=np.float64)
        found.update({(kind, heads): colour for heads, colour in zip(turns, colours, strict=True)})
    return found


def _row(bar: _Bar, lanes: int) -> tuple[float, float]:
    """Top and height of a bar."""
    height = LANE / lanes
    return bar.unit.rank - LANE / 2 + bar.lane * height, height


def _draw_bar(axes: Any, bar: _Bar, lanes: int, colour: Any) -> None:
    top, height = _row(bar, lanes)
    style = {"facecolors": [colour], "edgecolors": "white", "linewidth": 0.6, "zorder": 2}
    axes.broken_barh([(bar.start, bar.end - bar.start)], (top, height), **style)


def _label(axes: Any, run: RankTimeline, bars: list[_Bar], lanes: int, colours: Any, horizon: float) -> None:
    """The chunk of the keys, in one size for the whole picture; nothing if that does not fit in most bars."""
    names = [str(run.shared.column_of(bar.unit).chunk) for bar in bars]
    width = np.array([bar.end - bar.start for bar in bars]) * FIGURE_WIDTH * PLOT_SHARE * 72 / horizon - 1.5
    digits = max(map(len, names), default=1)
    size = min(LARGEST_LABEL, float(np.median(width)) / (digits * GLYPH)) if lanes <= 2 else 0.0
    if size < SMALLEST_LABEL:
        return
    for bar, name, room in zip(bars, names, width, strict=True):
        if room >= len(name) * GLYPH * size:
            top, height = _row(bar, lanes)
            style = {"size": size, "ha": "center", "va": "center_baseline", "zorder": 4}
            axes.text((bar.start + bar.end) / 2, top + height / 2, name, color=text_colour(colours[bar.unit.kind, bar.unit.heads]), **style)


def _hops(run: RankTimeline) -> list[tuple[int, int]]:
    """Units between which states go from rank to rank; none where so many lines would hide the bars."""
    legs = [unit for unit in run.shared.units if unit.leg is not None and run.shared.hops(unit)]
    found = [(unit.number, unit.after) for unit in legs if unit.after is not None and run.shared.units[unit.after].leg is not None]
    return found if len(found) <= MOST_HOPS else []


def _draw_hops(axes: Any, run: RankTimeline, bars: list[_Bar], lanes: int) -> None:
    by_number = {bar.unit.number: bar for bar in bars}
    for numbers in _hops(run):
        before, after = (by_number[number] for number in numbers)
        middles = [sum(_row(bar, lanes)) - _row(bar, lanes)[1] / 2 for bar in (before, after)]
        axes.plot([before.end, after.start], middles, color=HOP, lw=0.7, zorder=3)


def _dress(axes: Any, run: RankTimeline) -> None:
    """Axes, ticks and the two titles of a panel."""
    axes.set_ylim(run.ranks - 0.5, -0.5)
    axes.set_yticks(range(run.ranks))
    axes.set_ylabel("rank")
    axes.tick_params(length=3)
    axes.axvline(run.makespan, color=INK, lw=1.8, zorder=5, clip_on=False)
    axes.set_title(f"dash-attn, {run.execution}", loc="left", fontsize=13, fontweight="bold")
    notes = f"makespan {plain_number(round(run.makespan), 7)} us, efficiency {run.efficiency:.3f} ({run.model[:-1]} model)"
    axes.set_title(notes, loc="right", fontsize=10)


def _explain(figure: Any, runs: Sequence[RankTimeline]) -> None:
    from matplotlib import colormaps
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = sorted({unit.kind for unit in runs[0].shared.units})
    names = ["first kind of head", "second kind of head"] if len(kinds) > 1 else ["heads"]
    middle = (LIGHTEST + DARKEST) / 2
    handles: list[Any] = [Patch(color=colormaps[SHADES[kind % 2]](middle), lw=0, label=names[kind]) for kind in kinds]
    if any(map(_hops, runs)):
        handles.append(Line2D([], [], color=HOP, lw=0.7, label="states hop"))
    handles += [Patch(facecolor=IDLE, edgecolor="#bbbbbb", lw=0.6, label="idle"), Line2D([], [], color=INK, lw=1.8, label="makespan")]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, handlelength=2.2, title=NUMBERS)
