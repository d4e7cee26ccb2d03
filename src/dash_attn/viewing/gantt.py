"""Gantt charts: workers over time, tasks coloured by Q tile, stalls in red. Draws simulated and measured runs alike.

Small runs are crisp: one rectangle per phase of a task, labelled with its Q tile where that fits. Large ones are an image of
workers x time in which every pixel is the exact average of what its worker did meanwhile.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..simulation.simulate import Timeline
from . import style
from .style import BOUND, FIGURE_WIDTH, GLYPH, IDLE, INK, LANE, REDUCE_SHADE, STALL, STALL_PALE, q_tile_colours, text_colour
from .task_times import Floats, TaskTimes, times_of
from .words import describe_machine, describe_problem, plain_number

MOST_BARS = 2500  # tasks in the whole picture; more are drawn as an image
MOST_LANES = 40
IMAGE_BINS = 2400
PLOT_SHARE = 0.83  # of the figure's width that the time axis takes
BACKGROUND_BAND = 0.36  # share of a lane for reduces that go on behind the computes
Image = NDArray[np.float64]


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
            _draw_bars(axes, spans, colours, (FIGURE_WIDTH * PLOT_SHARE * 72 / horizon, 0.3 * 72))
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
    text = f"{slowest.makespan / spans.makespan:.2f}x as fast\nas {slowest.name}" if saved else ""
    room = saved / axes.get_xlim()[1] * FIGURE_WIDTH * PLOT_SHARE * 72  # points on paper
    if saved > 0.12 * slowest.makespan and room > GLYPH * 12 * max(map(len, text.splitlines())):
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


def _draw_bars(axes: Any, spans: TaskTimes, colours: NDArray[np.float64], points: tuple[float, float]) -> None:
    """Draw a run. `colours` has one RGBA row per task; `points` is the size on paper of one time unit and of one lane."""
    top = (spans.worker_of_task - LANE / 2).astype(np.float64)
    shaded = colours * (REDUCE_SHADE, REDUCE_SHADE, REDUCE_SHADE, 1.0)
    lane = LANE if not spans.drains else LANE * (1 - BACKGROUND_BAND)
    _chains(axes, spans, facecolors="white", linewidths=0.0)
    _rectangles(axes, (spans.compute_start, spans.compute_end), (top, np.full(len(top), lane)), facecolors=colours, edgecolors="white")
    _rectangles(axes, (spans.reduce_start, spans.reduce_end), _reduce_rows(spans, top), facecolors=shaded, edgecolors="white")
    start, end = spans.waits
    lost = end > start
    stalls = {"facecolors": STALL_PALE, "edgecolors": STALL, "hatch": "//////", "linewidths": 0.0}
    _rectangles(axes, (start[lost], end[lost]), (top[lost], np.full(int(lost.sum()), lane)), **stalls)
    _chains(axes, spans, facecolors="none", edgecolors=INK, linewidths=0.9)
    _label(axes, spans, colours, points, lane)


def _reduce_rows(spans: TaskTimes, top: Floats) -> tuple[Floats, Floats]:
    """Top and height of each reduce: the whole lane, or a band of it per drain."""
    if not spans.drains:
        return top, np.full(len(top), LANE)
    band = LANE * BACKGROUND_BAND / spans.drains
    return top + LANE * (1 - BACKGROUND_BAND) + band * (spans.position % spans.drains), np.full(len(top), band)


def _rectangles(axes: Any, x: tuple[Floats, Floats], y: tuple[Floats, Floats], **look: Any) -> None:
    from matplotlib.collections import PolyCollection

    left, right = x
    top, bottom = y[0], y[0] + y[1]
    corners = np.stack([left, top, right, top, right, bottom, left, bottom], axis=1).reshape(-1, 4, 2)
    axes.add_collection(PolyCollection(list(corners), **{"linewidths": 0.5, **look}))


def _chains(axes: Any, spans: TaskTimes, **look: Any) -> None:
    """One rectangle around every chain."""
    tickets, start, end = spans.chains
    top = (spans.worker[tickets] - LANE / 2).astype(np.float64)
    _rectangles(axes, (start, end), (top, np.full(len(top), LANE)), **look)


def _label(axes: Any, spans: TaskTimes, colours: NDArray[np.float64], points: tuple[float, float], lane: float) -> None:
    """The Q tile in every compute, in one size for the whole picture; nothing if the widest label does not fit."""
    per_unit, per_lane = points
    digits = len(str(spans.q_tiles - 1))
    width = float((spans.compute_end - spans.compute_start).min(initial=np.inf)) * per_unit
    size = min(9.5, per_lane * lane * 0.72, (width - 1.5) / (digits * GLYPH))
    if size < 5.0:
        return
    middle = (spans.compute_start + spans.compute_end) / 2
    y = spans.worker_of_task - LANE / 2 + lane / 2
    for x, row, q_tile, colour in zip(middle, y, spans.q_tile, colours, strict=True):
        look = {"size": size, "ha": "center", "va": "center_baseline", "color": text_colour(colour)}
        axes.text(x, row, str(q_tile), zorder=8, **look)  # above the line of the lower bound


def raster(spans: TaskTimes, colours: NDArray[np.float64], bins: int) -> Image:
    """RGB image [workers, bins] over 0..makespan. `colours` has one row per task."""
    worker, start, end, rgb = _segments(spans, colours[:, :3])
    by_worker = np.lexsort((start, worker))
    worker, start, end, rgb = worker[by_worker], start[by_worker], end[by_worker], rgb[by_worker]
    bounds = np.searchsorted(worker, np.arange(spans.lanes + 1))
    edges = np.linspace(0.0, spans.makespan, bins + 1, dtype=np.float64)
    rows = [_row(start[a:b], end[a:b], rgb[a:b], edges) for a, b in pairwise(bounds)]
    return np.clip(np.stack(rows), 0.0, 1.0)


def _segments(spans: TaskTimes, rgb: NDArray[np.float64]) -> tuple[NDArray[np.int64], Floats, Floats, Image]:
    """(worker, start, end, colour) of everything that fills a worker's time. Reduces in the background do not."""
    from matplotlib.colors import to_rgb

    wait_start, wait_end = spans.waits
    phases = [
        (spans.compute_start, spans.compute_end, rgb),
        (wait_start, wait_end, np.broadcast_to(np.array(to_rgb(STALL)), rgb.shape)),
    ]
    if not spans.drains:
        phases.append((spans.reduce_start, spans.reduce_end, rgb * REDUCE_SHADE))
    worker = np.tile(spans.worker_of_task, len(phases))
    start, end, colour = (np.concatenate(column) for column in zip(*phases, strict=True))
    lasting = end > start
    return worker[lasting], start[lasting], end[lasting], colour[lasting]


def _row(start: Floats, end: Floats, rgb: Image, edges: Floats) -> Image:
    """Average colour between edges, from the running integral of the colour over time."""
    from matplotlib.colors import to_rgb

    idle = np.array(to_rgb(IDLE))
    times = np.append(0.0, np.stack([start, end], axis=1))
    ends = np.concatenate([np.zeros((1, 3)), np.cumsum((end - start)[:, None] * (rgb - idle), axis=0)])
    integral = np.repeat(ends, 2, axis=0)[: len(times)]
    at_edges = np.stack([np.interp(edges, times, integral[:, channel]) for channel in range(3)], axis=1)
    averages: Image = idle + np.diff(at_edges, axis=0) / np.diff(edges)[:, None]
    return averages
