"""The tasks of a run in a panel.

Small runs are crisp: one rectangle per phase of a task, labelled with its Q tile where that fits. Large ones are an image of
workers x time in which every pixel is the exact average of what its worker did meanwhile.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .style import IDLE, INK, REDUCE_SHADE, STALL, STALL_PALE, text_colour
from .task_times import Floats, TaskTimes

LANE = 0.84  # of the distance between workers, or ranks
BACKGROUND_BAND = 0.36  # share of a lane for reduces that go on behind the computes
GLYPH = 0.64  # width of a digit, in font sizes
Image = NDArray[np.float64]


def draw_bars(axes: Any, spans: TaskTimes, colours: NDArray[np.float64], points: tuple[float, float]) -> None:
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


def _rectangles(axes: Any, x: tuple[Floats, Floats], y: tuple[Floats, Floats], **style: Any) -> None:
    from matplotlib.collections import PolyCollection

    left, right = x
    top, bottom = y[0], y[0] + y[1]
    corners = np.stack([left, top, right, top, right, bottom, left, bottom], axis=1).reshape(-1, 4, 2)
    axes.add_collection(PolyCollection(list(corners), **{"linewidths": 0.5, **style}))


def _chains(axes: Any, spans: TaskTimes, **style: Any) -> None:
    """One rectangle around every chain."""
    tickets, start, end = spans.chains
    top = (spans.worker[tickets] - LANE / 2).astype(np.float64)
    _rectangles(axes, (start, end), (top, np.full(len(top), LANE)), **style)


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
        style = {"size": size, "ha": "center", "va": "center_baseline", "color": text_colour(colour)}
        axes.text(x, row, str(q_tile), zorder=8, **style)  # above the line of the lower bound


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
    times = np.stack([start, end], axis=1).ravel()
    areas = np.cumsum((end - start)[:, None] * (rgb - idle), axis=0)
    before = np.concatenate([np.zeros((1, 3)), areas[:-1]]) if len(areas) else areas
    integral = np.stack([before, areas], axis=1).reshape(-1, 3)
    if not len(times):
        return np.broadcast_to(idle, (len(edges) - 1, 3)).copy()
    at_edges = np.stack([np.interp(edges, times, integral[:, channel]) for channel in range(3)], axis=1)
    averages: Image = idle + np.diff(at_edges, axis=0) / np.diff(edges)[:, None]
    return averages
