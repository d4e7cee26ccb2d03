"""A hash of what a Matplotlib figure shows: its texts, and the numbers behind its lines, shapes and images.

Fonts, layout and rendering are not in it: they differ between versions of Matplotlib.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

DIGITS = 6  # behind the point: more would be rounding


def shown(figure: Any) -> str:
    found = hashlib.sha256()
    for part in _parts(figure):
        found.update(f"{part}\n".encode() if isinstance(part, str) else _numbers(part))
    return found.hexdigest()[:16]


def _numbers(values: Any) -> bytes:
    plain = np.round(np.ma.filled(np.ma.asarray(values, dtype=np.float64), np.nan), DIGITS) + 0.0  # no -0.0
    return f"{plain.shape}".encode() + plain.tobytes()


def _parts(figure: Any) -> Iterator[Any]:
    yield from (text.get_text() for text in figure.texts)
    yield from (text.get_text() for legend in figure.legends for text in legend.get_texts())
    for axes in figure.axes:
        yield from _words(axes)
        if axes.get_label() != "<colorbar>":  # which Matplotlib draws
            yield from _data(axes)


def _words(axes: Any) -> Iterator[Any]:
    yield from (axes.get_title(loc=place) for place in ("left", "center", "right"))
    for axis in (axes.xaxis, axes.yaxis):
        yield axis.get_label_text()
        yield from _ticks(axis)
    yield from (text.get_text() for text in axes.texts)


def _ticks(axis: Any) -> Iterator[Any]:
    """Where we put them, and what we write there. Others Matplotlib chooses."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter

    places, labels = axis.get_major_locator(), axis.get_major_formatter()
    if isinstance(places, FixedLocator):
        yield places.locs
        if isinstance(labels, (FixedFormatter, FuncFormatter)):
            yield from (labels(place, index) for index, place in enumerate(places.locs))


def _data(axes: Any) -> Iterator[Any]:
    from matplotlib.colors import to_rgba_array

    yield from (getattr(text, attribute) for text in axes.texts for attribute in ("xy", "xyann") if hasattr(text, attribute))
    yield from (text.get_position() for text in axes.texts)
    for line in axes.lines:
        yield line.get_xydata()
        yield to_rgba_array(line.get_color())
    for patch in axes.patches:
        corners = patch.get_patch_transform().transform(patch.get_path().vertices)
        yield corners.min(0), corners.max(0)
        yield patch.get_facecolor()
    for collection in axes.collections:
        yield collection.get_offsets()
        yield from (path.vertices for path in collection.get_paths())
        yield collection.get_facecolor() if collection.get_array() is None else collection.get_array()
    for image in axes.images:
        yield image.get_array()
        yield image.get_extent()
