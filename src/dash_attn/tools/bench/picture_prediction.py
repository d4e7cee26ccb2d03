"""Measured kernel times over predicted ones, from what `dash-attn calibrate` or benchmarks/predict.py wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...scheduling.json_fields import as_list, as_number, as_text, as_whole, read_json_file
from ...viewing.style import INK
from .picture_style import GRID, OTHER_LOOK, SCHEDULE_LOOKS, in_known_order, thousands, write

CLOSE = 0.1
BAND = "#e3ecfb"
NOTE = """Backward kernel alone, bf16. The constants per head dim were fitted to measured times like these.
Shaded: within 10 %. Labels: mask, length, head dim, error of the prediction"""
TICKS = (0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)  # ms

Row = dict[str, Any]


def read(path: Path) -> dict[str, Any]:
    """`gpu` and `rows` of either kind of file."""
    found = read_json_file(path, "file of predictions")
    try:
        rows = as_list(found["rows"] if "rows" in found else found["measured"], "rows")
        gpu = as_text(found["environment"]["gpu"] if "environment" in found else found["name"], "the name of the machine")
        if not rows:
            raise ValueError("there are no rows")
        for row in rows:
            _check_row(row)
    except (KeyError, TypeError):
        raise ValueError(f"{path} holds no predictions, as `dash-attn calibrate` or benchmarks/predict.py writes them") from None
    except ValueError as error:
        raise ValueError(f"{path} holds no predictions, as `dash-attn calibrate` or benchmarks/predict.py writes them: {error}") from None
    return {"gpu": gpu, "rows": rows}


def _check_row(row: Row) -> None:
    for key in ("schedule", "mask"):
        as_text(row[key], key)
    for key in ("head_dim", "seqlen"):
        as_whole(row[key], key, least=1)
    for key in ("measured_us", "predicted_us", "error"):
        if as_number(row[key], key) <= 0 and key != "error":
            raise ValueError(f"{key} must be a time > 0; got {row[key]}")


def draw(prediction: dict[str, Any], path: Path) -> None:
    """One dot per schedule and shape."""
    write(path, lambda: figure_of(prediction))


def figure_of(prediction: dict[str, Any]) -> Any:
    from matplotlib.figure import Figure

    rows = prediction["rows"]
    figure = Figure(figsize=(10.4, 8.2))
    axes = figure.subplots()
    figure.subplots_adjust(0.085, 0.09, 0.985, 0.855)
    _scales(axes, [row[key] / 1000 for row in rows for key in ("measured_us", "predicted_us")])
    for name in in_known_order({row["schedule"] for row in rows}):
        _scatter(axes, name, [row for row in rows if row["schedule"] == name])
    for row in outliers(rows):
        _label(axes, row)
    axes.set_xlabel("predicted by the simulator (ms)")
    axes.set_ylabel("measured (ms)")
    axes.legend(loc="lower right", framealpha=1, edgecolor="white", handletextpad=0.3)
    figure.text(0.012, 0.985, _title(prediction), size=17, weight="bold", va="top")
    figure.text(0.012, 0.942, NOTE, va="top", linespacing=1.3)
    return figure


def outliers(rows: list[Row]) -> list[Row]:
    return [row for row in rows if abs(row["error"]) > CLOSE]


def _title(prediction: dict[str, Any]) -> str:
    rows = prediction["rows"]
    gpu = prediction["gpu"].removeprefix("NVIDIA ")
    return f"The fitted simulator gives {len(rows) - len(outliers(rows))} of {len(rows)} kernel times on {gpu} within 10 %"


def _scales(axes: Any, times: list[float]) -> None:
    """Two logarithmic axes, the diagonal, and the band that counts as close."""
    low, high = min(times) / 1.25, max(times) * 1.25
    left = low / 1.9  # room for the labels of the shortest times
    axes.set(xscale="log", yscale="log", xlim=(left, high), ylim=(low, high))
    for axis, first in ((axes.xaxis, left), (axes.yaxis, low)):
        ticks = [tick for tick in TICKS if first <= tick <= high]
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_ticks([], minor=True)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    ends = [left, high]
    # error = predicted / measured - 1
    axes.fill_between(ends, [x / (1 + CLOSE) for x in ends], [x / (1 - CLOSE) for x in ends], color=BAND, zorder=1)
    axes.plot(ends, ends, color=INK, linewidth=1.2, zorder=2)


def _scatter(axes: Any, name: str, rows: list[Row]) -> None:
    colour, marker = SCHEDULE_LOOKS.get(name, OTHER_LOOK)
    predicted, measured = ([row[key] / 1000 for row in rows] for key in ("predicted_us", "measured_us"))
    axes.scatter(predicted, measured, s=75, color=colour, marker=marker, edgecolor="white", linewidth=0.6, zorder=4, label=name)


def _label(axes: Any, row: Row) -> None:
    """Outside the band: left of a point above it, right of one below."""
    text = f"{row['mask']} {thousands(row['seqlen'])}, d{row['head_dim']}: {100 * row['error']:+.0f} %"
    above = row["error"] < 0
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    where = {"xytext": (-9 if above else 9, 0), "textcoords": "offset points", "ha": "right" if above else "left", "va": "center"}
    point = (row["predicted_us"] / 1000, row["measured_us"] / 1000)
    axes.annotate(text.replace("-", "\N{MINUS SIGN}"), point, size=12, color=INK, bbox=paper, zorder=3, **where)
