"""Gantt charts: workers over time, tasks coloured by Q tile, stalls in red. Draws simulated and measured runs alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..simulation.simulate import Timeline
from . import style
from .gantt_tasks import draw_bars, raster
from .style import BOUND, FIGURE_WIDTH, IDLE, INK, REDUCE_SHADE, STALL, STALL_PALE, q_tile_colours
from .task_times import TaskTimes, times_of
from .words import describe_machine, describe_problem, plain_number

MOST_BARS = 2500  # tasks in the whole picture; more are drawn as an image
MOST_LANES = 40
IMAGE_BINS = 2400
PLOT_SHARE = 0.83  # of the figure's width that the time axis takes


def gantt(runs: Sequence[Timeline | TaskTimes], path: str | Path, title: str | None = None) -> None:
    """Draw runs below each other on one time axis and write the picture to `path` (.png or .svg)."""
    style.check_chart(runs, path)
    from matplotlib import rc_context

    with rc_context(style.SMALL_STYLE):
        panels = [run if isinstance(run, TaskTimes) else times_of(run) for run in runs]
        crisp = sum(len(p.q_tile) for p in panels) <= MOST_BARS and max(p.lanes for p in panels) <= MOST_LANES
        figure = _figure(panels, crisp, title or _title(runs))
        style.save(figure, path, None if crisp else ("white", INK, BOUND, STALL, IDLE))


def _figure(panels: Sequence[TaskTimes], crisp: bool, title: str) -> Any:
    heights = [max(1.1, 0.3 * p.lanes) if crisp else 1.2 + 0.017 * min(p.lanes, 160) for p in panels]
    figure, all_axes = style.panels(heights, 0.55 * len(panels) + 1.45, title)
    horizon = 1.015 * (max(max(p.makespan, p.lower_bound or 0.0) for p in panels) or 1.0)
    slowest = {source: max((p for p in panels if p.source == source), key=lambda p: p.makespan) for source in {p.source for p in panels}}
    mappable = q_tile_colours(max(p.q_tiles for p in panels))
    for axes, spans in zip(all_axes, panels, strict=True):
        axes.set_xlim(0, horizon)
        axes.axvspan(0, spans.makespan, color=IDLE, lw=0, zorder=0)
        colours = mappable.to_rgba(spans.q_tile)
        if crisp:
            draw_bars(axes, spans, colours, (FIGURE_WIDTH * PLOT_SHARE * 72 / horizon, 0.3 * 72))
        else:
            extent = (0, spans.makespan, spans.lanes - 0.5, -0.5)
            axes.imshow(raster(spans, colours, IMAGE_BINS), extent=extent, aspect="auto", zorder=1)
        _dress(axes, spans)
        _mark(axes, spans, slowest[spans.source], crisp)
    all_axes[-1].set_xlabel(panels[0].time_label)
    _explain(figure, all_axes, mappable, panels, crisp)
    return figure


def _dress(axes: Any, spans: TaskTimes) -> None:
    from matplotlib.ticker import FixedLocator, MaxNLocator

    lanes = spans.lanes
    name = "worker" if lanes == spans.workers else f"worker\n({lanes} of {spans.workers} used)"
    titles = spans.name, spans.notes or f"makespan {plain_number(spans.makespan, 4)}"
    style.dress(axes, (lanes, name), titles, spans.makespan)
    axes.yaxis.set_major_locator(FixedLocator(range(lanes)) if lanes <= 16 else MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))


def _mark(axes: Any, spans: TaskTimes, slowest: TaskTimes, crisp: bool) -> None:
    """The bound that a run cannot beat, and how it compares with the slowest run of the picture."""
    if spans.lower_bound is not None:
        if not crisp:  # blue alone is hard to see on an image
            axes.axvline(spans.lower_bound, color="white", lw=2.6, alpha=0.9, zorder=4)
        axes.axvline(spans.lower_bound, color=BOUND, lw=1.8, ls=(0, (4, 2)), zorder=6)
    saved = slowest.makespan - spans.makespan
    if saved > 0.12 * slowest.makespan:
        text = f"{slowest.makespan / spans.makespan:.2f}x as fast\nas {slowest.name}"
        axes.text(spans.makespan + saved / 2, 0.5, text, transform=axes.get_xaxis_transform(), ha="center", va="center", fontsize=12)


def _explain(figure: Any, all_axes: Any, mappable: Any, panels: Sequence[TaskTimes], crisp: bool) -> None:
    """Colour bar and legend."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    bar = figure.colorbar(mappable, ax=list(all_axes), label="Q tile", pad=0.012, fraction=0.025, aspect=3.2 * figure.get_figheight())
    bar.minorticks_off()
    bar.outline.set_visible(False)
    q_tiles = max(p.q_tiles for p in panels)
    bar.set_ticks(np.arange(q_tiles) if q_tiles <= 12 else MaxNLocator(8, integer=True).tick_values(0, q_tiles - 1)[:-1])
    bar.ax.tick_params(length=0)
    middle = mappable.to_rgba(q_tiles // 2)
    handles: list[Any] = [Patch(color=middle, lw=0, label="compute")]
    if crisp or not any(p.drains for p in panels):
        handles.append(Patch(color=(*(REDUCE_SHADE * c for c in middle[:3]), 1.0), lw=0, label="reduce"))
    hatched: Any = {"facecolor": STALL_PALE, "edgecolor": STALL, "hatch": "//////"}
    handles.append(Patch(**(hatched if crisp else {"color": STALL}), lw=0, label="stall"))
    handles += style.idle_and_end()
    if any(p.lower_bound is not None for p in panels):
        handles.append(Line2D([], [], color=BOUND, lw=1.8, ls=(0, (4, 2)), label="lower bound"))
    style.legend(figure, handles)


def _title(runs: Sequence[Timeline | TaskTimes]) -> str:
    """Problem and machine, if all simulated runs share them."""
    lines = {
        f"{describe_problem(run.schedule.problem)}\n{describe_machine(run.machine, run.schedule.workers)}"
        for run in runs
        if isinstance(run, Timeline)
    }
    return lines.pop() if len(lines) == 1 else ""
