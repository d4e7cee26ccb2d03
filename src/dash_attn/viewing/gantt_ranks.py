"""Gantt charts of a cluster: ranks over time. A bar is a unit. Its colour tells the kind of its heads, its shade which heads.

The number in a bar is the chunk of its keys. The chunk of its queries is one of the rank's.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..scheduling.ranks.units import Unit
from ..simulation.cluster import RankTimeline
from . import style
from .style import FIGURE_WIDTH, GLYPH, IDLE, LANE, text_colour
from .words import plain_number

SHADES = ("Blues", "Oranges")  # of the two kinds of head: light, and different for colour-blind eyes
LIGHTEST, DARKEST = 0.32, 0.72
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
    top: float
    height: float
    colour: NDArray[np.float64]


def gantt_of_ranks(runs: Sequence[RankTimeline], path: str | Path, title: str) -> None:
    """Draw runs below each other on one time axis and write the picture to `path` (.png or .svg)."""
    style.check_chart(runs, path)
    from matplotlib import rc_context

    with rc_context(style.SMALL_STYLE):
        style.save(_figure(runs, title), path)


def _figure(runs: Sequence[RankTimeline], title: str) -> Any:
    row = 0.42 if runs[0].ranks <= 8 else 0.26
    figure, all_axes = style.panels([row * run.ranks for run in runs], 0.75 * len(runs) + 1.5, title)
    horizon = 1.015 * max(run.makespan for run in runs)
    for axes, run in zip(all_axes, runs, strict=True):
        _draw(axes, run, horizon)
    all_axes[-1].set_xlabel("microseconds")
    _explain(figure, runs)
    return figure


def _draw(axes: Any, run: RankTimeline, horizon: float) -> None:
    axes.set_xlim(0, horizon)
    bars = _bars(run)
    _draw_idle(axes, run, bars)
    for bar in bars:
        look = {"facecolors": [bar.colour], "edgecolors": "white", "linewidth": 0.6, "zorder": 2}
        axes.broken_barh([(bar.start, bar.end - bar.start)], (bar.top, bar.height), **look)
    _label(axes, run, bars, horizon)
    _draw_hops(axes, run, bars)
    notes = f"makespan {plain_number(round(run.makespan), 7)} us, efficiency {run.efficiency:.3f} ({run.model[:-1]} model)"
    style.dress(axes, (run.ranks, "rank"), (f"dash-attn, {run.execution}", notes), run.makespan)
    axes.set_yticks(range(run.ranks))


def lanes_of(by_rank: Sequence[Sequence[Unit]], start: NDArray[Any], end: NDArray[Any]) -> dict[int, int]:
    """By number, rank by rank and as they start: units of a rank that overlap get lanes of their own."""
    lanes = {}
    for units in by_rank:
        free: list[float] = []  # when each lane is
        for unit in sorted(units, key=lambda unit: start[unit.number]):
            lane = next((lane for lane, until in enumerate(free) if until <= start[unit.number]), len(free))
            free[lane : lane + 1] = [end[unit.number]]
            lanes[unit.number] = lane
    return lanes


def _bars(run: RankTimeline) -> list[_Bar]:
    """Of all legs. Endings take no time worth a bar."""
    legs = [[unit for unit in units if unit.leg is not None] for units in run.shared.by_rank]
    lanes, colours = lanes_of(legs, run.start, run.end), _colours(run)
    height = LANE / (1 + max(lanes.values(), default=0))
    bars = []
    for number, lane in lanes.items():
        unit = run.shared.units[number]
        times = float(run.start[number]), float(run.end[number])
        bars.append(_Bar(unit, *times, lane, unit.rank - LANE / 2 + lane * height, height, colours[unit.kind, unit.heads]))
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


def _label(axes: Any, run: RankTimeline, bars: list[_Bar], horizon: float) -> None:
    """The chunk of the keys, in one size for the whole picture; nothing if that does not fit in most bars."""
    names = [str(run.shared.column_of(bar.unit).chunk) for bar in bars]
    width = np.array([bar.end - bar.start for bar in bars]) * FIGURE_WIDTH * PLOT_SHARE * 72 / horizon - 1.5
    digits = max(map(len, names), default=1)
    few_lanes = all(bar.lane < 2 for bar in bars)
    size = min(LARGEST_LABEL, float(np.median(width)) / (digits * GLYPH)) if few_lanes else 0.0
    if size < SMALLEST_LABEL:
        return
    for bar, name, room in zip(bars, names, width, strict=True):
        if room >= len(name) * GLYPH * size:
            look = {"size": size, "ha": "center", "va": "center_baseline", "zorder": 4, "color": text_colour(bar.colour)}
            axes.text((bar.start + bar.end) / 2, bar.top + bar.height / 2, name, **look)


def _hops(run: RankTimeline) -> list[tuple[int, int]]:
    """Units between which states go from rank to rank; none where so many lines would hide the bars."""
    legs = [unit for unit in run.shared.units if unit.leg is not None and run.shared.hops(unit)]
    found = [(unit.number, unit.after) for unit in legs if unit.after is not None and run.shared.units[unit.after].leg is not None]
    return found if len(found) <= MOST_HOPS else []


def _draw_hops(axes: Any, run: RankTimeline, bars: list[_Bar]) -> None:
    by_number = {bar.unit.number: bar for bar in bars}
    for numbers in _hops(run):
        before, after = (by_number[number] for number in numbers)
        middles = [bar.top + bar.height / 2 for bar in (before, after)]
        axes.plot([before.end, after.start], middles, color=HOP, lw=0.7, zorder=3)


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
    style.legend(figure, handles + style.idle_and_end(), NUMBERS)
