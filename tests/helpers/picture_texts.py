"""Whether the texts of a picture can be read."""

from __future__ import annotations

from typing import Any


def overlaps(figure: Any) -> list[tuple[str, str]]:
    """Texts outside the axes' ticks that lie on each other or outside the figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    parts = [*figure.texts, *figure.legends]
    for axes in filter(lambda axes: axes.get_visible(), figure.axes):
        parts += [label for label in (axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts) if label.get_text()]
    boxes = [(str(part), part.get_window_extent(canvas.get_renderer())) for part in parts]
    whole = figure.bbox
    outside = [(name, "edge") for name, box in boxes if box.x0 < 0 or box.y0 < 0 or box.x1 > whole.x1 or box.y1 > whole.y1]
    return outside + [(a, b) for i, (a, one) in enumerate(boxes) for b, two in boxes[:i] if one.overlaps(two)]
