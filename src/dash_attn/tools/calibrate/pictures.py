"""Pictures of what `dash-attn calibrate` or benchmarks/predict.py wrote: measured times over predicted ones, and errors by schedule."""

import math
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ...formats import MACHINES, PREDICTIONS
from ...scheduling.json_fields import as_list, as_number, as_text, as_whole, read_json_file
from ...viewing import style as plot_style
from ...viewing.style import INK

CLOSE = 0.1
BAND, GRID = "#e3ecfb", "#dddddd"
# Colours that colour-blind eyes tell apart (after Okabe and Ito, and Tol); every schedule also has a marker of its own.
SCHEDULE_LOOKS = {
    "ascending": ("#d55e00", "v"),
    "descending": ("#e69f00", "^"),
    "spt": ("#009e73", "D"),
    "shift": ("#56b4e9", ">"),
    "symmetric_shift": ("#cc79a7", "s"),
    "alternating": ("#222222", "o"),
    "weave": ("#882255", "X"),
    "arrival": ("#44aa99", "P"),
    "shift_blocks": ("#332288", "<"),
}
OTHER_LOOK = ("#888888", "*")
STYLE: Any = {**plot_style.STYLE, "font.size": 13, "axes.titlesize": 14, "legend.fontsize": 13}
STYLE |= {"axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 0.7}
PREDICTION_NOTE = """Backward kernel alone, bf16. The constants per head dim were fitted to measured times like these.
Shaded: within 10 %. Labels: mask, length, head dim, error of the prediction (where there is room)"""
ERRORS_NOTE = "Error of the predicted time; left of 0 the kernel took longer. A dot is a shape, the bar their median. Shaded: within 10 %"
TICKS = (0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)  # ms
SPREAD = 0.13  # of a row of errors, between two lines of dots
WIDTH, ROW, TOP, BOTTOM = 10.4, 0.62, 1.05, 0.8  # inches

LABEL_SIZE, LINE, MARKER = 12, 16, 6  # of labels, on paper: their size, the height of a line, half the width of a point
LETTER = 0.56  # width of a letter, in sizes

Row = dict[str, Any]
Box = tuple[float, float, float, float]  # left, bottom, right, top: in points on paper


def write(path: Path, make: Callable[[], Any]) -> None:
    """Make a figure in our style and write it; the same figure gives the same file."""
    plot_style.check_format(path, "a picture")
    from matplotlib import rc_context

    with rc_context(STYLE):
        plot_style.save(make(), path, exact=())


def in_known_order(schedules: Iterable[str]) -> list[str]:
    """Schedules as SCHEDULE_LOOKS lists them, unknown ones last."""
    known = list(SCHEDULE_LOOKS)
    return sorted(schedules, key=lambda name: known.index(name) if name in known else len(known))


def thousands(n: int) -> str:
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)


def read(path: Path) -> dict[str, Any]:
    """`gpu` and `rows` of either kind of file."""
    found = read_json_file(path, "file of predictions")
    try:
        (MACHINES if MACHINES.field in found else PREDICTIONS).check(found, "it")
        rows = as_list(found["rows"] if "rows" in found else found["measured"], "rows")
        gpu = as_text(found["environment"]["gpu"] if "environment" in found else found["name"], "the name of the machine")
        if not rows:
            raise ValueError("there are no rows")
        for row in rows:
            _check_row(row)
    except (KeyError, TypeError, ValueError) as error:
        why = f": {error}" if isinstance(error, ValueError) else ""
        raise ValueError(f"{path} holds no predictions, as `dash-attn calibrate` or benchmarks/predict.py writes them{why}") from None
    return {"gpu": gpu, "rows": rows}


def _check_row(row: Row) -> None:
    for key in ("schedule", "mask"):
        as_text(row[key], key)
    for key in ("head_dim", "seqlen"):
        as_whole(row[key], key, least=1)
    for key in ("measured_us", "predicted_us", "error"):
        if as_number(row[key], key) <= 0 and key != "error":
            raise ValueError(f"{key} must be a time > 0; got {row[key]}")


def prediction_figure(prediction: dict[str, Any]) -> Any:
    """One dot per schedule and shape."""
    from matplotlib.figure import Figure

    rows = prediction["rows"]
    figure = Figure(figsize=(WIDTH, 8.2))
    axes = figure.subplots()
    figure.subplots_adjust(0.085, 0.09, 0.985, 0.855)
    _scales(axes, [row[key] / 1000 for row in rows for key in ("measured_us", "predicted_us")])
    for name in in_known_order({row["schedule"] for row in rows}):
        colour, marker = SCHEDULE_LOOKS.get(name, OTHER_LOOK)
        points = [row for row in rows if row["schedule"] == name]
        predicted, measured = ([row[key] / 1000 for row in points] for key in ("predicted_us", "measured_us"))
        axes.scatter(predicted, measured, s=75, color=colour, marker=marker, edgecolor="white", linewidth=0.6, zorder=4, label=name)
    _labels(axes, rows)
    axes.set_xlabel("predicted by the simulator (ms)")
    axes.set_ylabel("measured (ms)")
    axes.legend(loc="lower right", framealpha=1, edgecolor="white", handletextpad=0.3)
    gpu = prediction["gpu"].removeprefix("NVIDIA ")
    title = f"The fitted simulator gives {len(rows) - len(outliers(rows))} of {len(rows)} kernel times on {gpu} within 10 %"
    figure.text(0.012, 0.985, title, size=17, weight="bold", va="top")
    figure.text(0.012, 0.942, PREDICTION_NOTE, va="top", linespacing=1.3)
    return figure


def outliers(rows: list[Row]) -> list[Row]:
    return [row for row in rows if abs(row["error"]) > CLOSE]


def _scales(axes: Any, times: list[float]) -> None:
    """Two logarithmic axes, the diagonal, and the band that counts as close."""
    low, high = min(times) / 1.25, max(times) * 1.5
    left = low / 3  # room for the labels of the shortest times
    axes.set(xscale="log", yscale="log", xlim=(left, high), ylim=(low, high))
    for axis, first in ((axes.xaxis, left), (axes.yaxis, low)):
        ticks = [tick for tick in TICKS if first <= tick <= high]
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_ticks([], minor=True)
    axes.grid()
    ends = [left, high]
    # error = predicted / measured - 1
    axes.fill_between(ends, [x / (1 + CLOSE) for x in ends], [x / (1 - CLOSE) for x in ends], color=BAND, zorder=1)
    axes.plot(ends, ends, color=INK, linewidth=1.2, zorder=2)


def _labels(axes: Any, rows: list[Row]) -> None:
    """Left of points above the band, right of those below, if it can be: as near as is free of points and other labels."""
    scale = 72 / axes.figure.dpi  # points on paper per pixel
    frame = (*axes.bbox.min * scale, *axes.bbox.max * scale)
    places = {id(row): axes.transData.transform((row["predicted_us"] / 1000, row["measured_us"] / 1000)) * scale for row in rows}
    taken: list[Box] = [(x - MARKER, y - MARKER, x + MARKER, y + MARKER) for x, y in places.values()]
    for row in sorted(outliers(rows), key=lambda row: -abs(row["error"])):
        text = f"{row['mask']} {thousands(row['seqlen'])}, d{row['head_dim']}: {100 * row['error']:+.0f} %".replace("-", "\N{MINUS SIGN}")
        outside = -1 if row["error"] < 0 else 1
        lines_up = sorted(np.arange(-20, 21) / 2, key=lambda lines: (abs(lines), outside * lines))
        for side, lines in product((outside, -outside), lines_up):
            box = _box(places[id(row)], side, lines, len(text))
            if _overlap(box, frame) == box and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                _annotate(axes, row, text, (1.5 * MARKER * side, LINE * lines), 3 - len(taken) / 1000)  # lines go below labels
                break


def _box(place: Any, side: int, lines: float, letters: int) -> Box:
    near, far = (place[0] + side * (MARKER + width) for width in (0, MARKER + LETTER * LABEL_SIZE * letters))
    middle = place[1] + LINE * lines
    return min(near, far), middle - LINE / 2, max(near, far), middle + LINE / 2


def _overlap(a: Box, b: Box) -> Box | None:
    left, bottom, right, top = max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])
    return (left, bottom, right, top) if left < right and bottom < top else None


def _annotate(axes: Any, row: Row, text: str, offset: tuple[float, float], zorder: float) -> None:
    """A label that is not beside its point is tied to it by a line."""
    is_left = offset[0] < 0
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    where = {"xytext": offset, "textcoords": "offset points", "ha": "right" if is_left else "left", "va": "center"}
    line = {"arrowprops": {"arrowstyle": "-", "color": INK, "linewidth": 0.6, "relpos": (float(is_left), 0.5), "shrinkA": 0}}
    point = (row["predicted_us"] / 1000, row["measured_us"] / 1000)
    axes.annotate(text, point, size=LABEL_SIZE, color=INK, bbox=paper, zorder=zorder, **where, **(line if offset[1] else {}))


def errors_figure(prediction: dict[str, Any]) -> Any:
    from matplotlib.figure import Figure

    rows = prediction["rows"]
    names = in_known_order({row["schedule"] for row in rows})
    errors = {name: [100 * row["error"] for row in rows if row["schedule"] == name] for name in names}  # in per cent
    height = TOP + ROW * len(errors) + BOTTOM
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.subplots()
    figure.subplots_adjust(0.19, BOTTOM / height, 0.74, 1 - TOP / height)
    axes.axvspan(-100 * CLOSE, 100 * CLOSE, color=BAND, zorder=0)
    axes.axvline(0, color=INK, linewidth=1.2, zorder=1)
    for row, (name, found) in enumerate(errors.items()):
        _row(axes, row, name, found)
    axes.set_yticks(range(len(errors)), list(errors))
    axes.set_ylim(len(errors) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("predicted / measured \N{MINUS SIGN} 1 (%)")
    axes.grid(axis="x")
    figure.text(0.012, 1 - 0.12 / height, _errors_title(prediction), size=16, weight="bold", va="top")
    figure.text(0.012, 1 - 0.5 / height, ERRORS_NOTE, size=11, va="top")
    return figure


def _row(axes: Any, row: int, name: str, errors: list[float]) -> None:
    """Dots in lines above each other, so that equal errors stay visible."""
    colour, marker = SCHEDULE_LOOKS.get(name, OTHER_LOOK)
    lines = [row + SPREAD * ((i % 3) - 1) for i in range(len(errors))]
    axes.scatter(sorted(errors), lines, s=48, color=colour, marker=marker, edgecolor="white", linewidth=0.6, zorder=4)
    middle = median(errors)
    axes.plot([middle, middle], [row - 0.34, row + 0.34], color=INK, linewidth=2.4, zorder=5)
    worst = max(errors, key=abs)
    text = f"median {middle:+.1f} %, worst {worst:+.0f} %".replace("-", "\N{MINUS SIGN}")
    axes.text(1.02, row, text, transform=axes.get_yaxis_transform(), va="center", size=11.5, color=INK)


def _errors_title(prediction: dict[str, Any]) -> str:
    gpu = prediction["gpu"].removeprefix("NVIDIA ")
    sizes = [abs(row["error"]) for row in prediction["rows"]]
    rms = math.sqrt(sum(size * size for size in sizes) / len(sizes))
    return f"The simulator on {gpu}: off by {100 * median(sizes):.1f} % in the median of {len(sizes)} runs, {100 * rms:.1f} % rms"
