"""Results as a JSON file, and the few numbers that sum them up."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...scheduling.json_fields import as_list, as_number, as_object, as_text, as_whole, read_fields, read_json_file, shortened
from .names import OURS, UNORDERED
from .shape import PASSES, Shape

FORMAT = 1
RATIOS = (
    "ratio_to_cudnn",
    "ratio_to_fastest_peer",
    "ratio_to_unordered",
    "ratio_to_equal_heads",
)  # None, or not there: nobody to compare with
SUSTAINED = ("seconds", "ms", "watts", "sm_mhz", "joules", "tflops")
MEASURED, HOST_MEASURED = ("median_ms", "tflops", "ratio_to_cudnn"), ("median_us", "p20_us", "p80_us")
Results = dict[str, Any]


def save(results: Results, path: Path) -> None:
    """Write aside, then rename: an interrupted benchmark leaves the shapes it finished."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(aside, path)


def read(path: Path) -> Results:
    results = read_json_file(path, "file of benchmark results")
    if not isinstance(results, dict) or results.get("format") != FORMAT or "rows" not in results:
        raise ValueError(f"{path} holds no benchmark results of format {FORMAT}")
    try:
        _check(results)
    except ValueError as error:
        raise ValueError(f"{path} holds damaged benchmark results: {error}") from None
    return results


def _check(results: Results) -> None:
    """What reports and pictures look at."""
    read_fields(results, "the file", ("format", "suite", "repeats", "environment", "rows"), tuple(results))
    as_text(results["suite"], "suite")
    as_whole(results["repeats"], "repeats", least=1)
    as_whole(results.get("processes", 1), "processes", least=1)
    as_text(as_object(results["environment"], "environment").get("gpu"), "environment.gpu")
    for part in ("missing", "energy"):
        as_object(results.get(part, {}), part)
    for row in as_list(results["rows"], "rows"):
        _check_row(row, ("shape", "candidate", "pass", "status"), MEASURED)
        Shape.from_json(row["shape"])
        if row["pass"] not in PASSES:
            raise ValueError(f"pass must be {' or '.join(PASSES)}; got {shortened(row['pass'])}")
    for row in as_list(results.get("host", []), "host"):
        _check_row(row, ("candidate", "status"), HOST_MEASURED)


def _check_row(row: Any, names: tuple[str, ...], measured: tuple[str, ...]) -> None:
    as_object(row, "a row")
    needed = measured if row.get("status") == "ok" else ("reason",)
    read_fields(row, "a row", (*names, *needed), tuple(row))
    for name in ("candidate", "status"):
        as_text(row[name], name)
    for name in (*MEASURED, *HOST_MEASURED, *RATIOS, "energy_j"):
        if row.get(name) is not None:
            _check_positive(row[name], name)
    for name in SUSTAINED if "sustained" in row else ():
        _check_positive(as_object(row["sustained"], "sustained").get(name), f"sustained.{name}")
    for value in as_list(row.get("process_ms", []), "process_ms"):
        _check_positive(value, "process_ms")
    for name, ends in as_object(row.get("spread", {}), "spread").items():
        if len(as_list(ends, f"spread.{name}")) != 2:
            raise ValueError(f"spread.{name} must have a lowest and a highest; got {shortened(ends)}")
        for value in ends:
            _check_positive(value, f"spread.{name}")
    missing = [name for name in needed if name not in RATIOS and row["status"] == "ok" and row[name] is None]
    if missing:
        raise ValueError(f"a row of status ok lacks {missing[0]}")


def _check_positive(value: Any, name: str) -> None:
    if as_number(value, name) <= 0:
        raise ValueError(f"{name} must be a number > 0; got {value}")


def kind(row: dict[str, Any]) -> str:
    """What a panel or table has in common, in words: everything of a shape but its length."""
    return Shape.from_json(row["shape"]).kind


def shape_of(row: dict[str, Any]) -> Shape:
    return Shape.from_json(row["shape"])


def case_names(rows: list[dict[str, Any]]) -> dict[Shape, str]:
    """A name for each shape: its kind; everything, where another one is of that kind or queries are fewer than keys."""
    shapes = unique(shape_of(row) for row in rows)
    kinds = [shape.kind for shape in shapes]
    return {shape: str(shape) if kinds.count(kind) > 1 or shape.shift else kind for shape, kind in zip(shapes, kinds, strict=True)}


def is_schedule(candidate: str) -> bool:
    """Whether a candidate is one of the schedules that `--schedules` times."""
    return candidate.startswith(f"{OURS}: ")


def schedule_name(candidate: str) -> str:
    return candidate.removeprefix(f"{OURS}: ")


def unique(values: Iterable[Any]) -> list[Any]:
    """Each value once, in order of appearance."""
    return list(dict.fromkeys(values))


def summary(results: Results, path: Path) -> dict[str, Any]:
    """Geometric means over the shapes: ours over cuDNN per pass, and ordered over unordered."""
    ours = [row for row in results["rows"] if row["candidate"] == OURS]
    said: dict[str, Any] = {"path": str(path), "suite": results["suite"], "shapes": len({json.dumps(row["shape"]) for row in ours})}
    for direction in ("forward", "backward"):
        for what in ("ratio_to_cudnn", "ratio_to_fastest_peer"):
            said[f"{direction}_{what}"] = _mean([row[what] for row in ours if row["pass"] == direction and row.get(what)])
    said["backward_ordered_over_unordered"] = _mean(_ordered_over_unordered(results["rows"]))
    said["failed"] = sum(row["status"] != "ok" for row in ours)
    if results.get("host"):
        said["host_us"] = {row["candidate"]: round(row["median_us"], 1) for row in results["host"] if row["status"] == "ok"}
    return said


def _ordered_over_unordered(rows: list[dict[str, Any]]) -> list[float]:
    times = {
        (row["candidate"], json.dumps(row["shape"])): row["median_ms"] for row in rows if row["pass"] == "backward" and "median_ms" in row
    }
    shapes = [shape for name, shape in times if name == OURS and (UNORDERED, shape) in times]
    return [times[UNORDERED, shape] / times[OURS, shape] for shape in shapes]


def _mean(ratios: list[float]) -> float | None:
    return round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 4) if ratios else None
