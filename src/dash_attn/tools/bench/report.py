"""Results: a JSON file, the few numbers that sum it up, and tables: one per pass and kind of shape, candidates below each other."""

import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .candidates import CUDNN, EQUAL_HEADS, OURS, UNORDERED, is_ours
from .shape import PASSES, Shape

Results = dict[str, Any]
Row = dict[str, Any]
Cells = list[list[str]]
Table = tuple[str, list[str], Cells]  # title, names of columns, rows


def save(results: Results, path: Path) -> None:
    """Write aside, then rename: an interrupted benchmark leaves the shapes it finished."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(aside, path)


def heading(results: Results) -> str:
    where, rows = results["environment"], results["rows"]
    often = f"{results['repeats']}" + (f" in {results['processes']} processes" if "processes" in results else "")
    unit = "TB/s of keys and values" if any(shape_of(row).cache for row in rows) else "TFLOP/s"
    said = f"{where.get('gpu')}, driver {where.get('driver_version', 'unknown')}, torch {where.get('torch')}, cuDNN {where.get('cudnn')}"
    said += f": {unit} and (speed relative to {CUDNN}), medians of {often}"
    if any(_baseline(row) == "*" for row in rows):
        said += f"\n* {CUDNN} cannot run this: speed relative to the fastest kernel that is not ours"
    return said


def tables(results: Results) -> Iterator[Table]:
    rows = results["rows"]
    for direction in unique(row["pass"] for row in rows):
        for key in unique(shape_of(row).kind for row in rows):
            yield f"{direction}: {key}", *table([row for row in rows if row["pass"] == direction and shape_of(row).kind == key])
    if results.get("host"):
        cells = [host_cells(row) for row in results["host"]]
        yield "host time of warm calls", ["", "us per call", "20-80 %"], cells


def table(rows: list[Row]) -> tuple[list[str], Cells]:
    shapes: list[Shape] = unique(shape_of(row) for row in rows)
    found = {(row["candidate"], shape_of(row)): row for row in rows}
    names = unique(row["candidate"] for row in rows)
    joules = {place: f"{row['energy_j']:.3g}" for place, row in found.items() if "energy_j" in row}  # what was not measured is not zero
    weighed = [shape for shape in shapes if any(shape == of for _, of in joules)]
    cells = [[name, *(cell(found.get((name, shape))) for shape in shapes)] for name in names]
    for line, name in zip(cells, names, strict=True):
        line += [joules.get((name, shape), "-") for shape in weighed]
    lengths = [shape.length for shape in shapes]  # with the batch where one length occurs with several
    labels = {shape: shape.length if lengths.count(shape.length) == 1 else f"{shape.batch} x {shape.length}" for shape in shapes}
    return ["", *labels.values(), *(f"J at {labels[shape]}" for shape in weighed)], cells


def cell(row: Row | None) -> str:
    """A speed, or why there is none."""
    if row is None:
        return "-"
    if "median_ms" not in row:
        return str(row["status"])
    shape, ratio = shape_of(row), row["ratio_to_cudnn"] or row.get("ratio_to_fastest_peer")
    # Attention to a cache is bound by what it reads.
    speed = f"{shape.cache_bytes / row['median_ms'] / 1e9:.2f}" if shape.cache else f"{row['tflops']:.0f}"
    return speed + (f" ({ratio:.2f}{_baseline(row)})" if ratio is not None else "")


def _baseline(row: Row) -> str:
    """A star where cuDNN is not what a speed is relative to."""
    return "*" if row.get("ratio_to_cudnn") is None and row.get("ratio_to_fastest_peer") else ""


def host_cells(row: Row) -> list[str]:
    if row["status"] != "ok":
        return [row["candidate"], row["status"], "-"]
    return [row["candidate"], f"{row['median_us']:.1f}", f"{row['p20_us']:.1f} - {row['p80_us']:.1f}"]


def reasons(results: Results) -> list[str]:
    """Nothing is dropped silently: who is missing, who failed, and why."""
    said = [f"{name}: not installed ({why})" for name, why in results.get("missing", {}).items()]
    if results.get("energy", {}).get("missing"):
        said.append(f"energy: not measured ({results['energy']['missing']})")
    for case in results.get("cases", []):
        said += [f"{name}, {case['case']}: cannot ({why})" for name, why in case["cannot"].items()]
    for row in [*results["rows"], *results.get("host", [])]:
        if row["status"] != "ok":
            what = f" {row['pass']}, {shape_of(row).kind}" if "shape" in row else ""
            said.append(f"{row['candidate']}{what}: {row['status']} ({row['reason']})")
    return unique(said)


def shape_of(row: Row) -> Shape:
    return Shape.from_json(row["shape"])


def unique(values: Iterable[Any]) -> list[Any]:
    """Each value once, in order of appearance."""
    return list(dict.fromkeys(values))


def summary(results: Results, path: Path) -> dict[str, Any]:
    """Geometric means over the shapes: ours over cuDNN per pass, and ordered over unordered."""
    ours = [row for row in results["rows"] if row["candidate"] == OURS]
    said: dict[str, Any] = {"path": str(path), "suite": results["suite"], "shapes": len({json.dumps(row["shape"]) for row in ours})}
    for direction in PASSES:
        for what in ("ratio_to_cudnn", "ratio_to_fastest_peer"):
            said[f"{direction}_{what}"] = _mean([row[what] for row in ours if row["pass"] == direction and row.get(what)])
    relative = [row["relative"] for row in relative_rows(results["rows"]) if row["candidate"] == OURS]
    said["backward_ordered_over_unordered"] = _mean(relative)
    said["failed"] = sum(row["status"] != "ok" for row in ours)
    if results.get("host"):
        said["host_us"] = {row["candidate"]: round(row["median_us"], 1) for row in results["host"] if row["status"] == "ok"}
    return said


def relative_rows(rows: list[Row]) -> list[Row]:
    """The backwards of auto and of each schedule, with their speed `relative` to the unordered kernel on the same shape."""
    timed = [row for row in rows if row["pass"] == "backward" and row.get("median_ms")]
    unordered = {json.dumps(row["shape"]): row["median_ms"] for row in timed if row["candidate"] == UNORDERED}
    ordered = [row for row in timed if is_ours(row["candidate"]) and row["candidate"] not in (UNORDERED, EQUAL_HEADS)]
    pairs = [(row, unordered.get(json.dumps(row["shape"]))) for row in ordered]
    return [{**row, "relative": time / row["median_ms"]} for row, time in pairs if time]


def _mean(ratios: list[float]) -> float | None:
    return round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 4) if ratios else None
