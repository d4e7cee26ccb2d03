"""Large runs: an image of workers x time in which every pixel is the exact average of what its worker did meanwhile."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .style import IDLE, REDUCE_SHADE, STALL
from .task_times import Floats, TaskTimes

Image = NDArray[np.float64]


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
